"""Time between tokens while long prompts arrive: prefill and decode apart, against one engine with and without chunks.

    python -m bench run prefill_decode_latency SMOLLM2_DIR --rounds 2 --seconds 30 --streams 4 --every-s 5
    nvidia-cuda-mps-control -d
    python -m bench run prefill_decode_latency MODEL_DIR --device cuda --random-weights --rounds 1 --seconds 10 --warm-s 8 \\
        --streams 32 --short-in 128 --short-out 256 --long-in 1536 --long-out 8 --every-s 0.0833 --chunk 512 \\
        --max-model-tokens 8192 --kv-gib 40 --shares 50,50 --hand-over all

The engine runs without HTTP: each engine is a process; the driver sends it requests and records when tokens arrive.
--streams short requests decode all the time. Long prompts arrive at fixed times, the same in every layout. The layouts run
one after the other, --rounds times, with the same resources: on a CPU all cores for one engine or half of them for each
of two; on a GPU the whole GPU, or two processes that share it (start MPS first, and give the SM percentages with --shares).
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import os
import random
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

from bench.contract import BenchmarkError, Better, Needs, Report, Result
from stoker.base.config import EngineSettings, HandoffSettings, KvSettings, SchedSettings
from stoker.base.ids import RequestId
from stoker.sched.request import GenerateRequest, SamplingParams, TokenChunk

NAME = "prefill_decode_latency"
HELP = "time between tokens while long prompts arrive: one engine, chunked or not, or prefill and decode apart"
NEEDS = Needs(packages=("torch", "numpy", "safetensors"), programs="CUDA MPS for two engines on one GPU")
NO_GOAL_MS = 1e6  # a goal for the time between tokens that limits no step
LAYOUTS = {  # name -> what the results call it
    "unchunked": "one engine, whole prompts",
    "chunked": "one engine, chunked prefill",
    "apart": "prefill and decode apart",
}


@dataclass(frozen=True)
class EngineUnderLoad:
    process: multiprocessing.process.BaseProcess
    pipe: Connection


def engine_main(
    pipe: Connection, model: str, settings: EngineSettings, random_weights: bool, cores: list[int] | None
) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    from stoker.base.log import set_up
    from stoker.engine.llm import LLM

    set_up("warning")
    llm = LLM(model, settings, random_weights_seed=0 if random_weights else None)
    llm.generate([[5] * 200], SamplingParams(temperature=0.0), 4)
    pipe.send("ready")
    engine = llm.built.engine
    while True:
        while pipe.poll(0.002 if engine.idle else 0):
            message = pipe.recv()
            if message is None:
                llm.close()
                return
            engine.add(message)
        chunks = engine.step()
        if chunks:
            pipe.send((time.monotonic(), chunks))


def start_engine(
    args: argparse.Namespace, settings: EngineSettings, cores: list[int] | None, share: str | None
) -> EngineUnderLoad:
    ours, theirs = multiprocessing.Pipe()
    if share is not None:
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = share
    process = multiprocessing.get_context("spawn").Process(
        target=engine_main, args=(theirs, args.model, settings, args.random_weights, cores), daemon=True
    )
    process.start()
    os.environ.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", None)
    return EngineUnderLoad(process, ours)


def engines_of(args: argparse.Namespace, layout: str) -> list[EngineUnderLoad]:
    """Start the engines of a layout. The one that decodes comes last."""
    base = EngineSettings(
        device=args.device,
        dtype=args.dtype,
        max_model_tokens=args.max_model_tokens,
        kv=KvSettings(memory_gib=args.kv_gib),
        sched=SchedSettings(step_tokens=args.chunk, max_rows=args.streams + 16),
    )
    cores = sorted(os.sched_getaffinity(0)) if args.device == "cpu" else None
    if layout != "apart":
        step = args.chunk if layout == "chunked" else args.max_model_tokens
        # No goal for the time between tokens, so that every step has `step` tokens.
        whole = replace(base, sched=replace(base.sched, step_tokens=step, target_itl_ms=NO_GOAL_MS))
        return [start_engine(args, whole, cores, None)]
    half = replace(
        base, kv=KvSettings(memory_gib=args.kv_gib / 2 if args.kv_gib else None), num_threads=1 if cores else None
    )
    transports = ("local", "tcp") if cores else ("cuda_ipc", "tcp")
    prefill = replace(
        half,
        sched=replace(half.sched, step_tokens=args.max_model_tokens),
        handoff=HandoffSettings(serves=True, transports=transports),
    )
    decode = replace(half, handoff=HandoffSettings(transports=transports))
    split = len(cores) // 2 if cores else 0
    shares = args.shares.split(",") if args.shares else [None, None]
    return [
        start_engine(args, prefill, cores[:split] if cores else None, shares[0]),
        start_engine(args, decode, cores[split:] if cores else None, shares[1]),
    ]


@dataclass
class RequestSource:
    """Makes the same requests for every layout."""

    args: argparse.Namespace
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    number: int = 0

    def request(self, num_in: int, num_out: int, kind: str) -> GenerateRequest:
        self.number += 1
        token_ids = [self.rng.randrange(10, self.args.vocab) for _ in range(num_in)]
        return GenerateRequest(
            RequestId(f"{kind}-{self.number}"), token_ids, num_in, SamplingParams(temperature=0.0), num_out
        )


@dataclass
class Observed:
    gaps: list[float] = field(default_factory=list)  # between tokens of the short requests
    ttfts: list[float] = field(default_factory=list)  # of the long ones
    tokens: int = 0
    started: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    requests: dict[str, GenerateRequest] = field(default_factory=dict)


def run_layout(args: argparse.Namespace, engines: list[EngineUnderLoad]) -> dict[str, Any]:
    load, seen, decode = RequestSource(args), Observed(), engines[-1]
    begin = time.monotonic()
    arrivals = [begin + args.warm_s + args.every_s * i for i in range(int(args.seconds / args.every_s))]
    end = begin + args.warm_s + args.seconds
    heapq.heapify(arrivals)

    def start(request: GenerateRequest, to: EngineUnderLoad) -> None:
        if to is not decode:
            request = replace(request, lease_id=str(request.request_id))
        seen.requests[request.request_id] = request
        seen.started[request.request_id] = time.monotonic()
        to.pipe.send(request)

    def start_short() -> None:
        to = engines[0] if args.hand_over == "all" else decode
        start(load.request(args.short_in, args.short_out, "short"), to)

    for _ in range(args.streams):
        start_short()
    while True:
        now = time.monotonic()
        if now > end:
            break
        while arrivals and arrivals[0] <= now:
            heapq.heappop(arrivals)
            start(load.request(args.long_in, args.long_out, "long"), engines[0])
        until = min([end, *arrivals[:1]]) - time.monotonic()
        for pipe in wait([engine.pipe for engine in engines], timeout=max(0.0, until)):
            assert isinstance(pipe, Connection)
            at, chunks = pipe.recv()
            for chunk in chunks:
                take(args, seen, decode, at, chunk, begin, start_short)
    for engine in engines:
        engine.pipe.send(None)
    for engine in engines:
        engine.process.join(20)
        engine.process.kill()
    return summary(args, seen)


def take(
    args: Any, seen: Observed, decode: EngineUnderLoad, at: float, chunk: TokenChunk, begin: float, start_short: Any
) -> None:
    request_id = chunk.request_id
    counts = at > begin + args.warm_s
    is_long = request_id.startswith("long")
    if chunk.finish is not None and chunk.finish.reason == "error":
        raise BenchmarkError(f"{request_id}: {chunk.finish.error_message}")
    if chunk.token_ids:
        seen.tokens += counts * len(chunk.token_ids)
        if request_id not in seen.last and is_long and counts:
            seen.ttfts.append(at - seen.started[request_id])
        elif request_id in seen.last and counts and not is_long:
            seen.gaps.append(at - seen.last[request_id])
        seen.last[request_id] = at
    if chunk.finish is None:
        return
    request = seen.requests[request_id]
    if chunk.finish.reason == "handoff":
        known = request.token_ids + chunk.token_ids
        decode.pipe.send(replace(request, token_ids=known, lease_id=None, ticket=chunk.ticket))
    elif not is_long:
        start_short()


def percentile_ms(values: list[float], part: float) -> float:
    return 1e3 * sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def summary(args: argparse.Namespace, seen: Observed) -> dict[str, Any]:
    return {
        "itl_ms": {f"p{part}": round(percentile_ms(seen.gaps, part / 100), 2) for part in (50, 75, 90, 95, 99)},
        "itl_max_ms": round(1e3 * max(seen.gaps, default=0.0), 1),
        "long_ttft_ms": {
            name: round(percentile_ms(seen.ttfts, part), 1) for name, part in (("p50", 0.5), ("p90", 0.9))
        },
        "long_prompts": len(seen.ttfts),
        "tokens_per_s": round(seen.tokens / args.seconds, 1),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_DIR")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--dtype", help="default: the engine's")
    parser.add_argument("--random-weights", action="store_true", help="random weights of config.json's shape")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=40.0, help="measured in each layout (default: %(default)s)")
    parser.add_argument("--warm-s", type=float, default=5.0, help="not measured, before (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="short requests at a time (default: %(default)s)")
    parser.add_argument("--short-in", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--short-out", type=int, default=96, help="default: %(default)s")
    parser.add_argument("--long-in", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--long-out", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--every-s", type=float, default=6.0, help="time between long prompts (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a prompt chunk (default: %(default)s)")
    parser.add_argument("--max-model-tokens", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--kv-gib", type=float, help="KV memory of all engines together")
    parser.add_argument(
        "--hand-over", choices=["long", "all"], default="long", help="which prompts the prefill engine computes"
    )
    parser.add_argument("--shares", metavar="P,D", help="SM percentages of prefill and decode under MPS, such as 50,50")


def run(args: argparse.Namespace) -> Report:
    args.vocab = min(48000, json.loads((Path(args.model) / "config.json").read_text())["vocab_size"])
    found: dict[str, list[dict[str, Any]]] = {layout: [] for layout in args.layouts}
    for number in range(args.rounds):
        for layout, rounds in found.items():
            engines = engines_of(args, layout)
            for engine in engines:
                if engine.pipe.recv() != "ready":
                    raise BenchmarkError(f"an engine of the layout {layout!r} did not start")
            rounds.append(run_layout(args, engines))
            print(number, layout, json.dumps(rounds[-1]), flush=True)
    return Report(_results(args, found), found)


def _results(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> list[Result]:
    """`apart` beside the two layouts with one engine."""

    def value(layout: str, group: str, name: str) -> float:
        return float(median(one[group][name] if name else one[group] for one in found[layout]))

    metrics: list[tuple[str, str, Better, str, str]] = [
        *((f"time between tokens {p}", "ms", "lower", "itl_ms", p) for p in ("p50", "p90", "p95", "p99")),
        *((f"TTFT of long prompts {p}", "ms", "lower", "long_ttft_ms", p) for p in ("p50", "p90")),
        ("output throughput", "tokens/s", "higher", "tokens_per_s", ""),
    ]
    case = f"{args.streams} streams, {1 / args.every_s:.3g} prompts/s of {args.long_in:,} tokens"
    others = [layout for layout in found if layout != "apart"] if "apart" in found else []
    return [
        Result(
            case,
            metric,
            unit,
            value("apart", group, name),
            better,
            LAYOUTS[other],
            value(other, group, name),
            "baseline",
        )
        for other in others
        for metric, unit, better, group, name in metrics
    ]
