"""Faults of a simulated fleet: a worker is lost, becomes slow, or cannot be reached. `--fault` gives them as text."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, cast, get_args

from stoker.base.errors import ConfigError
from stoker.base.ids import WorkerId
from stoker.sim.event_loop import EventLoop
from stoker.sim.simulated_gateway import SimulatedGateway

FaultKind = Literal["loss", "slow", "cut"]
_TEXT = re.compile(r"(\w+):([\w.-]+)@([\d.]+)\+([\d.]+)(?:x([\d.]+))?")
SYNTAX = "KIND:WORKER@START+SECONDS, such as loss:unified-0@60+30, cut:decode-1@10+5 or slow:prefill-0@60+30x4"


@dataclass(frozen=True, slots=True)
class SimFault:
    """`loss`: the process ends, and a new one is ready after `duration_s`. `cut`: the worker runs on but cannot be reached.
    `slow`: its steps take `factor` times as long."""

    kind: FaultKind
    worker_id: WorkerId
    start_s: float
    duration_s: float
    factor: float = 1.0


def parse_fault(text: str, workers: Collection[WorkerId]) -> SimFault:
    """Parse `--fault`."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--fault {text!r}: expected {SYNTAX}")
    kind, worker, start, duration, factor = match.groups()
    if kind not in get_args(FaultKind):
        raise ConfigError(
            f"--fault {text!r}: {kind!r} is not a kind of fault; known are {', '.join(get_args(FaultKind))}"
        )
    if worker not in workers:
        names = sorted(workers)
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        raise ConfigError(f"--fault {text!r}: there is no worker {worker!r}; the workers are {shown}")
    if (kind == "slow") != (factor is not None):
        raise ConfigError(f"--fault {text!r}: slow, and only slow, needs a factor; expected {SYNTAX}")
    try:
        numbers = [float(number) for number in (start, duration, factor or "1")]
    except ValueError:
        raise ConfigError(f"--fault {text!r}: expected {SYNTAX}") from None
    if numbers[1] <= 0 or numbers[2] <= 0:
        raise ConfigError(f"--fault {text!r}: the duration and the factor must be above 0")
    return SimFault(cast(FaultKind, kind), WorkerId(worker), *numbers)


def schedule_fault(fault: SimFault, gateway: SimulatedGateway, loop: EventLoop) -> None:
    """Let the fault happen at its time."""

    def set_speed(factor: float) -> None:
        gateway.engines[fault.worker_id].device.slowdown = factor

    end_s = fault.start_s + fault.duration_s
    if fault.kind == "slow":
        loop.at(fault.start_s, lambda: set_speed(fault.factor))
        loop.at(end_s, lambda: set_speed(1.0))
    else:
        loop.at(fault.start_s, lambda: gateway.lose([fault.worker_id], memory=fault.kind == "loss"))
        loop.at(end_s, lambda: gateway.restore([fault.worker_id]))
