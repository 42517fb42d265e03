"""Record the stages of a process start, for the log. Stages may overlap."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stoker.base.log import EventLog


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    start_s: float  # after the origin of the timeline
    seconds: float


class Timeline:
    """The stages of a start. Each start time is relative to `origin_s`."""

    def __init__(self, origin_s: float | None = None) -> None:
        """`origin_s`: a time.time() value, which all processes of a machine share. Default: the start of this process."""
        self.origin_s = process_start_s() if origin_s is None else origin_s
        self.stages: list[Stage] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begun_s = time.time()
        try:
            yield
        finally:
            self.add(name, begun_s, time.time())

    def add(self, name: str, begun_s: float, ended_s: float) -> None:
        self.stages.append(Stage(name, begun_s - self.origin_s, ended_s - begun_s))

    def log_to(self, log: EventLog) -> None:
        """Log one event for each stage."""
        for stage in self.stages:
            _log_stage(log, stage)

    def log_last_to(self, log: EventLog) -> None:
        """Log the stage that was added last."""
        _log_stage(log, self.stages[-1])


def _log_stage(log: EventLog, stage: Stage) -> None:
    log.event("timeline", stage=stage.name, start_s=round(stage.start_s, 3), seconds=round(stage.seconds, 3))


def process_start_s() -> float:
    """Return when this process started, as a time.time() value. If the system does not tell, return the current time."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            return time.time() - float(uptime.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return time.time()
