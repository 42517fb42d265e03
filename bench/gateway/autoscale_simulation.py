"""Goodput of the autoscaler on virtual time, compared with every fixed split, on several traces.

    python -m bench run autoscale_simulation

The simulator runs the real scheduler, router, fleet, admission and autoscaler; the step times are those of `autoscale_goodput`. So
the outcome does not depend on the machine. A worker that gets another role hands its requests off to others, which pull their KV,
as real workers do.
In the first phase of the benchmark's own trace, the prompts need nearly all workers: they compute at most about 60,000 tokens
per second, and 54,000 arrive.
The traces are a turn of the traffic in both directions, a slow change, and a burst.
"""

from __future__ import annotations

import argparse
import json
import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bench.contract import Needs, Report, Result
from bench.gateway.autoscale_goodput import AUTOSCALE, ITL_S, TTFT_S, WORKERS

if TYPE_CHECKING:
    from stoker.autoscale.settings import AutoscaleSettings
    from stoker.sim.calibration import Calibration
    from stoker.sim.simulation import Simulation
    from stoker.sim.workloads.workload import SimSession

NAME = "autoscale_simulation"
HELP = "goodput of the autoscaler in the simulator, compared with every fixed split, on five traces"
NEEDS = Needs(packages=("msgspec",))
_INPUT, _OUTPUT = (6000, 32, 9.0), (300, 300, 3.4)  # prompt tokens, output tokens, requests per second
_SECONDS = 80.0


@dataclass(frozen=True)
class ShiftingTrace:
    """Requests of two kinds at random times. `input_share` and `output_share` are the shares of their rates over time."""

    name: str
    input_share: Callable[[float], float]
    output_share: Callable[[float], float]
    seed: int = 1
    seconds: float = _SECONDS

    def describe(self) -> dict[str, object]:
        return {"trace": self.name, "seed": self.seed}

    def sessions(self) -> Iterator[SimSession]:
        from stoker.sim.workloads.workload import SimSession, SimTurn

        rng = random.Random(self.seed)
        found = []
        for (prompt, output, per_s), share in ((_INPUT, self.input_share), (_OUTPUT, self.output_share)):
            at_s = 0.0
            while (at_s := at_s + rng.expovariate(per_s)) < self.seconds:
                if rng.random() < share(at_s / self.seconds):
                    token = rng.randrange(1 << 20, 1 << 30)
                    found.append((at_s, SimTurn(((token, prompt),), output, token)))
        for number, (at_s, turn) in enumerate(sorted(found, key=lambda one: one[0])):
            yield SimSession(at_s, iter([turn]), f"s-{number}")


TRACES = (
    ShiftingTrace("input-heavy, then output-heavy", lambda t: float(t < 0.5), lambda t: float(t >= 0.5)),
    ShiftingTrace("output-heavy, then input-heavy", lambda t: float(t >= 0.5), lambda t: float(t < 0.5)),
    ShiftingTrace("slow change from input to output", lambda t: 1.0 - t, lambda t: t),
    ShiftingTrace("steady mix", lambda t: 0.5, lambda t: 0.5),
    ShiftingTrace("burst of input", lambda t: 0.3 + 0.7 * (0.4 < t < 0.6), lambda t: 0.4),
)


@dataclass
class ScaledRoles:
    """The autoscaler in a simulation: it samples the fleet as the gateway does, and changes roles."""

    simulation: Simulation
    settings: AutoscaleSettings
    until_s: float
    flips: list[str] = field(default_factory=list)

    def start(self) -> None:
        from stoker.autoscale.autoscaler import Autoscaler
        from stoker.gateway.scaling import FleetSampler

        gateway = self.simulation.gateway
        self._scaler = Autoscaler(self.settings)
        self._sampler = FleetSampler(gateway.fleet, gateway.load_book, gateway, gateway.ttft_s)
        self.simulation.loop.after(self.settings.interval_s, self._turn)

    def _turn(self) -> None:
        from stoker.autoscale.decision import Flip

        loop = self.simulation.loop
        sample = self._sampler.sample(loop.now_s)
        decision = self._scaler.decide(sample, loop.now_s)
        if isinstance(decision.action, Flip):
            self.simulation.gateway.change_role(decision.action.worker_id, decision.action.role)
            self.flips.append(f"{loop.now_s:.1f} s: {decision.action.describe()}; {decision.reason}")
            self._scaler.carried_out(decision.action, sample, loop.now_s)
        if loop.now_s < self.until_s:
            loop.after(self.settings.interval_s, self._turn)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=1, help="how often each trace is drawn, default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    report = Report(details=[])
    settings = autoscale_settings()
    for trace in TRACES:
        traces = [replace(trace, seed=seed) for seed in range(1, args.seeds + 1)]
        fixed = {split: sum(goodput(one, split)[0] for one in traces) / len(traces) for split in range(1, WORKERS)}
        found = [goodput(one, WORKERS // 2, settings) for one in traces]
        scaled = sum(one for one, _ in found) / len(found)
        best = max(fixed, key=lambda split: fixed[split])
        detail = {"trace": trace.name, "fixed": fixed, "autoscaler": scaled, "flips": [flips for _, flips in found]}
        print(json.dumps(detail), flush=True)
        report.details.append(detail)
        report.results.append(
            Result(
                f"{WORKERS} simulated workers; {trace.name}",
                "goodput",
                "requests/s",
                scaled,
                "higher",
                f"best fixed split ({best}P+{WORKERS - best}D)",
                fixed[best],
                "baseline",
                notes=f"good: first token within {TTFT_S:g} s, mean time between tokens within {ITL_S:g} s",
            )
        )
    return report


def autoscale_settings() -> AutoscaleSettings:
    """Return the settings of `autoscale_goodput`."""
    from stoker.autoscale.settings import AutoscaleSettings
    from stoker.base.settings import from_table

    return from_table(AutoscaleSettings, tomllib.loads(AUTOSCALE)["autoscale"], "autoscale")


def goodput(
    trace: ShiftingTrace, num_prefill: int, settings: AutoscaleSettings | None = None
) -> tuple[float, list[str]]:
    """Return the good requests per second of a trace, and the role changes. Without settings, roles stay."""
    from stoker.gateway.admission.admission_settings import AdmissionSettings
    from stoker.sim.simulation import SimConfig, SimFleet, Simulation

    fleet = SimFleet(prefill=num_prefill, decode=WORKERS - num_prefill)
    config = SimConfig(_calibration(), fleet, admission=AdmissionSettings(queue_s=60.0), session_keys=False)
    simulation = Simulation(config)
    flips: list[str] = []
    if settings is not None:
        scaled = ScaledRoles(simulation, settings, trace.seconds)
        scaled.start()
        flips = scaled.flips
    records = simulation.run(trace).records
    good = 0
    for i in records.answered():
        gap_s = (records.ended_s[i] - records.started_s[i] - records.ttft_s[i]) / max(1, records.output_tokens[i] - 1)
        good += records.ttft_s[i] <= TTFT_S and gap_s <= ITL_S
    return good / trace.seconds, flips


def _calibration() -> Calibration:
    """Return the worker of `bench/support/sleeping_worker.py`."""
    import stoker
    from stoker.sim.calibration import (
        FORMAT,
        CalibratedBounds,
        Calibration,
        LinkCosts,
        Residuals,
        StepModel,
        WorkerShape,
    )

    step = StepModel(knots=[1, 2049], knot_s=[0.0301, 0.2349], row_s=4.7e-3)
    shape = WorkerShape(
        block_tokens=16,
        step_tokens=2048,
        max_rows=256,
        target_itl_s=0.3,
        steps_ahead=0,
        kv_blocks=20_000,
        max_model_tokens=32_768,
        kv_token_bytes=1,
    )
    return Calibration(
        format=FORMAT,
        stoker=stoker.__version__,
        kind="estimate",
        model="sleeping",
        fingerprint="sleeping",
        device="none",
        shape=shape,
        step=step,
        bounds=CalibratedBounds(shape.max_rows, shape.step_tokens, shape.max_model_tokens),
        residuals=Residuals(0.0, 0.0, 0.0),
        transfer=LinkCosts(0.01, 1e12),
    )
