"""Limits of a worker's HTTP server. `stoker serve` sets some; the others are constants that tests change."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.errors import ConfigError
from stoker.base.settings import check_settings, setting
from stoker.base.volatile_lines import VOLATILE_LINES
from stoker.proto.openai.fields import MAX_CHOICES


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """What the server process may do for one request. None of these is a flag."""

    served_names: tuple[str, ...]  # the model's names in the API; answers carry the first one
    max_body_bytes: int = setting(32 << 20, "Maximum size of a request body.", ge=1)
    body_read_s: float = setting(60.0, "Timeout for reading a request body.", gt=0)
    client_stall_s: float = setting(60.0, "A client that reads nothing for this time is disconnected.", gt=0)
    max_choices: int = setting(
        MAX_CHOICES, "Maximum sequences of one request: n, or prompts times n.", ge=1, le=MAX_CHOICES
    )
    volatile_lines: tuple[str, ...] = VOLATILE_LINES
    cors_origins: tuple[str, ...] = ()
    strict: bool = False  # refuse request fields that are not known, instead of ignoring them
    max_stops: int = 16  # stop strings
    max_stop_token_ids: int = 1024  # the engine compares all of them at every token
    max_logit_biases: int = 1024
    max_tools: int = 1024
    drain_retry_after_s: float = 5.0
    text_threads: int = setting(2, "Threads that render and tokenize long prompts.", ge=1)
    inline_chars: int = 4096  # shorter prompts are tokenized on the event loop, where a thread would cost more

    def __post_init__(self) -> None:
        check_settings(self, "worker")
        if not self.served_names or not all(self.served_names):
            raise ConfigError("worker.served_names: give at least one model name, and no empty one")
