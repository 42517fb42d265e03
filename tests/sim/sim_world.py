"""A calibration and helpers for tests of the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from stoker import __version__
from stoker.sim.calibration import (
    FORMAT,
    CalibratedBounds,
    Calibration,
    HostCosts,
    LinkCosts,
    Residuals,
    StepModel,
    WorkerShape,
)
from stoker.sim.simulation import SimConfig, SimFleet, SimOutcome, Simulation
from stoker.sim.workloads.workload import SimSession, SimTurn, Workload

BLOCK = 16
SHAPE = WorkerShape(
    block_tokens=BLOCK,
    step_tokens=512,
    max_rows=16,
    target_itl_s=0.25,
    steps_ahead=0,
    kv_blocks=2000,
    max_model_tokens=8192,
    kv_token_bytes=1024,
)


def calibration(**shape: Any) -> Calibration:
    """A worker whose steps take 10 ms and 0.1 ms for each token."""
    return Calibration(
        format=FORMAT,
        stoker=__version__,
        kind="measured",
        model="tiny",
        fingerprint="abc",
        device="cpu",
        shape=msgspec.structs.replace(SHAPE, **shape),
        step=StepModel([1, 1001], [0.0101, 0.1101], context_s=1e-7),
        bounds=CalibratedBounds(16, 512, 8192),
        residuals=Residuals(0.02, 0.05, 0.05),
        host=HostCosts(0.001, 0.0, 0.001, 0.0),
        transfer=LinkCosts(0.002, 1e9),
    )


@dataclass(frozen=True)
class Listed:
    """A workload of given sessions: (start, turns)."""

    entries: tuple[tuple[float, tuple[SimTurn, ...]], ...]

    def sessions(self) -> Iterator[SimSession]:
        for number, (start_s, turns) in enumerate(self.entries):
            yield SimSession(start_s, iter(turns), f"s{number}")

    def describe(self) -> dict[str, object]:
        return {"workload": "listed"}


def alone(tokens: int, output: int, start_s: float = 0.0, token: int = 7) -> tuple[float, tuple[SimTurn, ...]]:
    return start_s, (SimTurn(((token, tokens),), output, token + 1_000_000),)


def simulate(workload: Workload, fleet: SimFleet, found: Calibration | None = None, **config: Any) -> SimOutcome:
    return Simulation(SimConfig(found or calibration(), fleet, **config)).run(workload)
