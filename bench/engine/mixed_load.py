"""Two loads on a real engine, once for each policy for mixed steps: throughput, TTFT, time between tokens.

The batch is all requests at once. In the other load, a quarter of the requests decode from the start, and the prompts of
the others arrive in groups of six.

    python -m bench run mixed_load --shape llama8b                                         # random weights, a GPU
    python -m bench run mixed_load --model MODEL_DIR --device cpu --count 16 --num-in 256 --num-out 32

The policies are those of the simulation (bench/engine/step_size.py): `largest` limits mixed steps like prefill-only
steps, `fixed` to a number of tokens, `goal` is the controller. All run in one engine, one after another, with different
prompts. `error` is the median relative error of the controller's fitted step times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract import Better, Needs, Report, Result
from bench.support.model_shapes import SHAPES, title

if TYPE_CHECKING:
    from stoker.engine.build import BuiltEngine
    from stoker.sched.step_size import StepSize

NAME = "mixed_load"
HELP = "throughput and time between tokens by the policy for mixed steps, on a real engine"
NEEDS = Needs(packages=("torch", "numpy", "safetensors"), programs="a GPU for the published shapes")
_GROUP = 6  # requests that arrive at the same time
_METRICS: tuple[tuple[str, str, str, Better], ...] = (
    ("throughput", "out_toks", "output tokens/s", "higher"),
    ("TTFT p90", "ttft_p90_ms", "ms", "lower"),
    ("time between tokens p50", "itl_p50_ms", "ms", "lower"),
    ("time between tokens p99", "itl_p99_ms", "ms", "lower"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, metavar="DIR", help="a model folder with weights")
    where.add_argument("--shape", choices=tuple(SHAPES), help="a published shape with random weights")
    parser.add_argument("--device", help="default: the GPU, if there is one")
    parser.add_argument("--count", type=int, default=256, help="requests, all at once; default: %(default)s")
    parser.add_argument("--num-in", type=int, default=1024, help="tokens of a prompt; default: %(default)s")
    parser.add_argument("--num-out", type=int, default=128, help="tokens of an answer; default: %(default)s")
    parser.add_argument("--fixed-tokens", type=int, default=2048, help="limit of `fixed`; default: %(default)s")
    parser.add_argument("--group-s", type=float, default=0.3, help="time between two groups; default: %(default)s")
    parser.add_argument("--target-itl-ms", type=float, nargs="+", default=[75.0], help="goals; default: 75")


def run(args: argparse.Namespace) -> Report:
    from bench.support.simulated_device import FixedSize
    from stoker.base.config import EngineSettings
    from stoker.engine.llm import LLM
    from stoker.sched.step_size import StepSize

    settings = EngineSettings(device=args.device, max_model_tokens=args.num_in + args.num_out + 1)
    with tempfile.TemporaryDirectory() as scratch:
        if args.shape:
            (Path(scratch) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        llm = LLM(args.model or scratch, settings, random_weights_seed=0 if args.shape else None)
    built = llm.built
    step_tokens = built.settings.step_tokens
    goals_s = [ms / 1e3 for ms in args.target_itl_ms]
    policies: dict[str, StepSize] = {
        "largest": StepSize(float("inf"), step_tokens),
        "fixed": FixedSize(min(args.fixed_tokens, step_tokens)),
        **{f"goal {goal_s * 1e3:g} ms": StepSize(goal_s, step_tokens) for goal_s in goals_s},
    }
    model = title(args.shape) if args.shape else args.model.name
    lengths = f"{args.num_in} in, {args.num_out} out"
    loads = {
        f"{args.count} requests at once, {lengths}": [0.0] * args.count,
        f"{args.count} requests, most in groups of 6 every {args.group_s:g} s, {lengths}": _grouped(args),
    }
    _measure(built, StepSize(goals_s[0], step_tokens), args, [0.0] * 8, "warm-up")
    report = Report(details={})
    for load, arrivals_s in loads.items():
        found = {}
        for policy, step_size in policies.items():
            found[policy] = _measure(built, step_size, args, arrivals_s, f"{load} {policy}")
            report.details[f"{model}, {load}, {policy}"] = found[policy]
            print(f"{load}, {policy}: " + " ".join(f"{key}={value:.4g}" for key, value in found[policy].items()))
        for policy in (name for name in policies if name.startswith("goal")):
            for baseline in ("largest", "fixed"):
                for metric, key, unit, better in _METRICS:
                    values = found[policy][key], better, f"{baseline} steps", found[baseline][key]
                    report.results.append(Result(f"{model}, {load}", metric, unit, *values, "baseline"))
    llm.close()
    return report


def _grouped(args: argparse.Namespace) -> list[float]:
    """A quarter of the requests arrive at once, the others in groups."""
    first = args.count // 4
    return [0.0] * first + [args.group_s * (1 + number // _GROUP) for number in range(args.count - first)]


def _measure(
    built: BuiltEngine, step_size: StepSize, args: argparse.Namespace, arrivals_s: list[float], name: str
) -> dict[str, float]:
    """Run one load. Every request has its own prompt, so the prefix cache finds nothing."""
    from stoker.base.ids import RequestId
    from stoker.sched.request import GenerateRequest, SamplingParams

    engine, rng = built.engine, random.Random(name)
    watched = _Watched(step_size)
    built.scheduler.step_size = watched  # type: ignore[assignment]
    end_id = min(48_000, built.vocab_size)
    sampling = SamplingParams(temperature=0.0)
    to_come = deque(
        GenerateRequest(
            RequestId(f"{name} {number}"),
            [rng.randrange(10, end_id) for _ in range(args.num_in)],
            args.num_in,
            sampling,
            args.num_out,
        )
        for number in range(len(arrivals_s))
    )
    times_s: dict[str, list[float]] = {}
    began_s = time.perf_counter()
    while engine.has_work or to_come:
        while to_come and arrivals_s[len(times_s)] <= time.perf_counter() - began_s:
            times_s[to_come[0].request_id] = []
            engine.add(to_come.popleft())
        chunks = engine.step()
        now_s = time.perf_counter()
        for chunk in chunks:
            times_s[chunk.request_id] += [now_s] * len(chunk.token_ids)
    wall_s = time.perf_counter() - began_s
    gaps = sorted(after - before for times in times_s.values() for before, after in itertools.pairwise(times))
    ttfts = sorted(
        times[0] - began_s - arrival_s for times, arrival_s in zip(times_s.values(), arrivals_s, strict=True)
    )
    costs = step_size.costs
    return {
        "out_toks": sum(map(len, times_s.values())) / wall_s,
        "wall_s": wall_s,
        "ttft_p50_ms": ttfts[len(ttfts) // 2] * 1e3,
        "ttft_p90_ms": ttfts[len(ttfts) * 9 // 10] * 1e3,
        "itl_p50_ms": gaps[len(gaps) // 2] * 1e3,
        "itl_p90_ms": gaps[len(gaps) * 9 // 10] * 1e3,
        "itl_p99_ms": gaps[len(gaps) * 99 // 100] * 1e3,
        "steps": float(watched.num_steps),
        "prefill_steps": len(watched.sizes),
        "prefill_step_tokens": statistics.median(watched.sizes),
        "fixed_ms": costs.fixed_s * 1e3,
        "token_us": costs.token_s * 1e6,
        "row_us": costs.row_s * 1e6,
        "error": statistics.median(watched.errors),
    }


class _Watched:
    """A StepSize that also compares each step's time with the one that the fitted costs predict."""

    def __init__(self, step_size: StepSize) -> None:
        self._step_size = step_size
        self.errors: list[float] = []
        self.sizes: list[int] = []  # tokens of the steps with prefill
        self.num_steps = 0

    def record(self, num_tokens: int, num_rows: int, step_s: float) -> None:
        costs = self._step_size.costs
        predicted_s = costs.fixed_s + costs.token_s * num_tokens + costs.row_s * num_rows
        self.num_steps += 1
        if num_tokens > num_rows:
            self.sizes.append(num_tokens)
            self.errors.append(abs(predicted_s / step_s - 1.0))
        self._step_size.record(num_tokens, num_rows, step_s)

    def limit(self, num_decodes: int, queued_tokens: int) -> int:
        return self._step_size.limit(num_decodes, queued_tokens)
