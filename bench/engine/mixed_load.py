"""A batch of requests on a real engine, once for each policy for mixed steps: throughput, TTFT, time between tokens.

    python -m bench run mixed_load --shape llama8b                                         # random weights, a GPU
    python -m bench run mixed_load --model MODEL_DIR --device cpu --count 16 --num-in 256 --num-out 32

The policies are those of the simulation (bench/engine/step_size.py): `largest` limits mixed steps like prefill-only
steps, `fixed` to a number of tokens, `goal` is the controller. All run in one engine, one after another, with different
prompts. `error` is the median relative error of the controller's fitted step times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
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
    parser.add_argument("--target-itl-ms", type=float, nargs="+", help="goals; default: the engine's default")


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
    goals_s = [ms / 1e3 for ms in args.target_itl_ms or ()] or [built.settings.target_itl_s]
    policies: dict[str, StepSize] = {
        "largest": StepSize(float("inf"), step_tokens),
        "fixed": FixedSize(min(args.fixed_tokens, step_tokens)),
        **{f"goal {goal_s * 1e3:g} ms": StepSize(goal_s, step_tokens) for goal_s in goals_s},
    }
    _measure(built, StepSize(goals_s[0], step_tokens), args, 8, args.num_out // 4, seed=99)  # warms up
    case = f"{title(args.shape) if args.shape else args.model.name}, {args.count} requests at once, "
    case += f"{args.num_in} in, {args.num_out} out"
    report, found = Report(details={}), {}
    for number, (policy, step_size) in enumerate(policies.items()):
        found[policy] = _measure(built, step_size, args, args.count, args.num_out, seed=number)
        report.details[f"{case}, {policy}"] = found[policy]
        print(f"{policy}: " + " ".join(f"{key}={value:.4g}" for key, value in found[policy].items()), flush=True)
    llm.close()
    for policy in (name for name in policies if name.startswith("goal")):
        for baseline in ("largest", "fixed"):
            for metric, key, unit, better in _METRICS:
                values = found[policy][key], better, f"{baseline} steps", found[baseline][key]
                report.results.append(Result(case, metric, unit, *values, "baseline"))
    return report


def _measure(
    built: BuiltEngine, step_size: StepSize, args: argparse.Namespace, count: int, num_out: int, seed: int
) -> dict[str, float]:
    """Run one batch. Every request has its own prompt, so the prefix cache finds nothing."""
    from stoker.base.ids import RequestId
    from stoker.sched.request import GenerateRequest, SamplingParams

    engine, rng = built.engine, random.Random(seed)
    watched = _Watched(step_size)
    built.scheduler.step_size = watched  # type: ignore[assignment]
    end_id = min(48_000, built.vocab_size)
    for number in range(count):
        token_ids = [rng.randrange(10, end_id) for _ in range(args.num_in)]
        request_id = RequestId(f"{seed}-{number}")
        engine.add(GenerateRequest(request_id, token_ids, args.num_in, SamplingParams(temperature=0.0), num_out))
    began_s, times_s = time.perf_counter(), dict[str, list[float]]()
    while engine.has_work:
        chunks = engine.step()
        now_s = time.perf_counter()
        for chunk in chunks:
            times_s.setdefault(chunk.request_id, []).extend([now_s] * len(chunk.token_ids))
    wall_s = time.perf_counter() - began_s
    gaps = sorted(after - before for times in times_s.values() for before, after in zip(times, times[1:], strict=False))
    ttfts = sorted(times[0] - began_s for times in times_s.values())
    costs = step_size.costs
    return {
        "out_toks": sum(map(len, times_s.values())) / wall_s,
        "wall_s": wall_s,
        "ttft_p50_ms": ttfts[len(ttfts) // 2] * 1e3,
        "ttft_p90_ms": ttfts[len(ttfts) * 9 // 10] * 1e3,
        "itl_p50_ms": gaps[len(gaps) // 2] * 1e3,
        "itl_p90_ms": gaps[len(gaps) * 9 // 10] * 1e3,
        "itl_p99_ms": gaps[len(gaps) * 99 // 100] * 1e3,
        "mixed_steps": len(watched.mixed),
        "mixed_tokens": statistics.median(watched.mixed) if watched.mixed else 0,
        "fixed_ms": costs.fixed_s * 1e3,
        "token_us": costs.token_s * 1e6,
        "row_us": costs.row_s * 1e6,
        "error": statistics.median(watched.errors) if watched.errors else 0.0,
        "steps": float(watched.num_steps),
    }


class _Watched:
    """A StepSize that also compares each step's time with the one that the fitted costs predict."""

    def __init__(self, step_size: StepSize) -> None:
        self._step_size = step_size
        self.errors: list[float] = []
        self.mixed: list[int] = []
        self.num_steps = 0

    def record(self, num_tokens: int, num_rows: int, step_s: float) -> None:
        costs = self._step_size.costs
        predicted_s = costs.fixed_s + costs.token_s * num_tokens + costs.row_s * num_rows
        self.num_steps += 1
        if num_tokens > num_rows:
            self.mixed.append(num_tokens)
            self.errors.append(abs(predicted_s / step_s - 1.0))
        self._step_size.record(num_tokens, num_rows, step_s)

    def limit(self, num_decodes: int, queued_tokens: int) -> int:
        return self._step_size.limit(num_decodes, queued_tokens)
