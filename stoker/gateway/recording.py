"""The routing classes of a gateway: the plain ones, or with `--record` those that record each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import stoker
from stoker.fleet.fleet import Fleet, FleetSettings
from stoker.fleet.load_book import LoadBook
from stoker.fleet.lost_blocks import BlockLosses
from stoker.gateway.config import GatewayConfig
from stoker.replay.recorder import (
    NoRecorder,
    RecordedFleet,
    RecordedIndexes,
    RecordedLoadBook,
    RecordedRouter,
    Recorder,
)
from stoker.replay.recording_file import RecordingWriter
from stoker.routing.router import PrefixIndexes, Router


@dataclass(frozen=True, slots=True)
class RoutingClasses:
    """Fleet, load book, prefix indexes and router of one gateway. `close` ends the recording."""

    fleet: Fleet
    load_book: LoadBook
    indexes: PrefixIndexes
    router: Router
    recorder: Recorder | NoRecorder
    close: Callable[[], None]


def routing_classes(config: GatewayConfig, losses: BlockLosses) -> RoutingClasses:
    settings = FleetSettings(health=config.health)
    routing, max_blocks = config.routing, config.routing.index_blocks
    path = config.recording.file
    if path is None:
        plain = Fleet(settings), LoadBook(), PrefixIndexes(max_blocks, losses)
        return RoutingClasses(*plain, Router(*plain, settings=routing), NoRecorder(), _nothing)
    header = {
        "stoker": stoker.__version__,
        "router": asdict(routing),
        "fleet": asdict(settings),
        "index_blocks": max_blocks,
    }
    writer = RecordingWriter(_of_process(path, config), int(config.recording.max_mib * (1 << 20)), header)
    recorder = Recorder(writer)
    recorded = (
        RecordedFleet(recorder, settings),
        RecordedLoadBook(recorder),
        RecordedIndexes(recorder, max_blocks, losses),
    )
    return RoutingClasses(*recorded, RecordedRouter(recorder, *recorded, routing), recorder, writer.close)


def _of_process(path: Path, config: GatewayConfig) -> Path:
    """Each process of a gateway decides for itself, and has a file of its own."""
    return path.with_name(f"{path.name}.{config.process}") if config.process_ports else path


def _nothing() -> None:
    """Do nothing."""
