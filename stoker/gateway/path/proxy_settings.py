"""The settings of the way to the workers: timeouts, retries, and other names of models."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stoker.base.errors import ConfigError
from stoker.base.settings import check_settings, required, setting
from stoker.base.volatile_lines import VOLATILE_LINES

_MEDIA_HOST = re.compile(r"([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?")


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """How requests are sent to workers, retried and resumed."""

    connect_s: float = setting(2.0, "Timeout for connecting to a worker.", unit="s", gt=0)
    first_byte_s: float = setting(
        600.0, "Timeout until a worker's response begins, and from there to the first byte of its body.", unit="s", gt=0
    )
    idle_s: float = setting(300.0, "Longest pause inside a worker's response before it counts as lost.", unit="s", gt=0)
    max_event_mib: float = setting(
        16.0,
        "Maximum size of one event of a worker's stream. A worker that sends a larger one has failed.",
        unit="MiB",
        gt=0,
    )
    max_answer_mib: float = setting(
        128.0,
        "Maximum size of a worker's answer that is not streamed.",
        unit="MiB",
        gt=0,
    )
    max_notes_mib: float = setting(
        32.0,
        "Maximum size of the notes in a Stoker worker's stream, from which another worker resumes it. A note has about 12 "
        "bytes for a token, and about 500 with 20 logprobs.",
        unit="MiB",
        gt=0,
    )
    retries: int = setting(
        3,
        "Maximum retries on other workers before the first byte of a response. A request is never retried after two workers "
        "failed while they ran it.",
        ge=0,
    )
    retry_share: float = setting(
        0.2,
        "Maximum retries as a share of all requests. Beyond it, a worker's failure is passed on to the client.",
        ge=0,
    )
    resumes: int = setting(3, "Maximum times that a broken stream is resumed on another worker.", ge=0)
    resume_grace_s: float = setting(
        10.0, "How long a broken stream waits for a worker that can resume it.", unit="s", ge=0
    )
    suspect_s: float = setting(
        600.0,
        "How long a request body is remembered after workers crashed while they ran it. 0 turns this off.",
        unit="s",
        ge=0,
    )

    volatile_line: tuple[str, ...] = setting(
        VOLATILE_LINES,
        "How lines at the start of a system prompt begin that change with every request. They are ignored when prompts for "
        "foreign engines are compared, and left out of Messages requests that are translated to chat. An empty text keeps "
        "all lines. Stoker workers have a setting of their own.",
    )
    media_hosts: tuple[str, ...] = setting(
        (),
        "Hosts, such as images.example.com or images.example.com:8443, from which foreign engines may fetch the images, "
        "videos, audio and files that clients name by http(s) URLs. All other URLs except data: are refused.",
    )

    def __post_init__(self) -> None:
        check_settings(self, "proxy")
        for text in self.media_hosts:
            if _MEDIA_HOST.fullmatch(text) is None:
                raise ConfigError(
                    f"proxy.media_hosts: {text!r} is not a host in lower case, with or without a port; write it like "
                    "images.example.com or images.example.com:8443"
                )

    @property
    def max_event_bytes(self) -> int:
        return int(self.max_event_mib * (1 << 20))

    @property
    def max_answer_bytes(self) -> int:
        return int(self.max_answer_mib * (1 << 20))

    @property
    def max_notes_bytes(self) -> int:
        return int(self.max_notes_mib * (1 << 20))


@dataclass(frozen=True, slots=True)
class AliasSettings:
    """Another name of a served model."""

    name: str = required(
        "The other name. One that ends in * stands for all names that begin so.",
        pattern=".{1,512}",
        expected="a model name",
    )
    model: str = required("The served model.", pattern=".{1,512}", expected="a model name")
    share: float = setting(
        1.0,
        "Share of the requests that go to this model. Below 1 it is a canary, beside another entry or a model of this name.",
        gt=0,
        le=1,
    )

    def __post_init__(self) -> None:
        check_settings(self, "alias")
        if self.share < 1 and self.name.endswith("*"):
            raise ConfigError(
                f"alias {self.name!r}: a name that ends in * cannot have a share; give each name its own entry"
            )
