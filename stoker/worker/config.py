"""What an operator may set about a worker's HTTP side. Frozen; the CLI fills it in."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.errors import ConfigError
from stoker.proto.openai.fields import MAX_CHOICES


@dataclass(frozen=True, slots=True)
class HttpConfig:
    served_names: tuple[str, ...]  # the first is the canonical one, which answers carry
    max_body_bytes: int = 32 << 20
    body_read_s: float = 60.0  # a body that takes longer to arrive is given up
    client_stall_s: float = 60.0  # a client that reads nothing for so long is dropped
    max_choices: int = MAX_CHOICES  # sequences of one request: n, or prompts times n
    max_stops: int = 16
    max_stop_token_ids: int = 1024  # the engine looks through them at every token
    max_logit_biases: int = 1024
    max_tools: int = 1024
    drain_retry_after_s: float = 5.0
    text_threads: int = 2  # for rendering and tokenizing long prompts
    inline_chars: int = 4096  # prompts up to this length are tokenized on the loop: a thread costs more

    def __post_init__(self) -> None:
        if not self.served_names or not all(self.served_names):
            raise ConfigError("worker.served_names is empty: a model needs a name to be asked for by")
        for name in ("max_body_bytes", "body_read_s", "client_stall_s", "max_choices", "text_threads"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"worker.{name}={getattr(self, name)} must be above 0")
        if self.max_choices > MAX_CHOICES:
            raise ConfigError(f"worker.max_choices={self.max_choices} > {MAX_CHOICES}")
