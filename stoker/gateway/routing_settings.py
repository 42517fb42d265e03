"""The settings of routing, and of what observes its decisions: the recording and the live twin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stoker.base.settings import check_settings, setting
from stoker.routing.settings import RouterSettings


@dataclass(frozen=True, slots=True)
class RoutingSettings(RouterSettings):
    """The router's settings, and what the gateway adds to them."""

    debug_routes: bool = setting(
        False, "Explain in the response header `x-stoker-route` why a worker was chosen.", flag="--debug-routes"
    )
    tokenize: bool = setting(
        True,
        "Compare conversations as exact token blocks where a worker provides its tokenizer. False compares them as text.",
        flag="--no-tokenize",
        flag_help="Compare conversations as text, not as token blocks.",
    )
    index_blocks: int = setting(2_000_000, "Prefix blocks remembered for each model.", ge=1)

    def __post_init__(self) -> None:
        check_settings(self, "routing")


@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """A recording of all routing decisions and of what they rest on, for `stoker trace`. It has no text of any request."""

    file: Path | None = setting(
        None,
        "New file that routing decisions are recorded to, from the start of the gateway. Process N of several adds `.N`.",
        flag="--record",
        metavar="FILE",
        default_text="no recording",
    )
    max_mib: float = setting(1024.0, "Maximum size of the file. Then the recording stops.", unit="MiB", gt=0)

    def __post_init__(self) -> None:
        check_settings(self, "recording")


@dataclass(frozen=True, slots=True)
class TwinSettings:
    """The live twin: predicts each request's time to first token, and names workers that are slower than predicted."""

    enabled: bool = setting(False, "Compare predicted with actual times.", flag="--twin")
    calibration: Path | None = setting(
        None,
        "File of `stoker calibrate` for the workers. Without it, workers are compared with each other.",
        default_text="none",
    )

    def __post_init__(self) -> None:
        check_settings(self, "twin")
