"""Inter-token latency while long prompts arrive: prefill and decode apart, against one engine with and without chunking.

    python bench/pd_latency.py MODEL_DIR OUT.json [--device cuda --dummy] [--layouts unchunked,chunked,apart] ...

The engine alone, without HTTP: each engine is a process, the driver hands it requests and notes when tokens come out. `--streams`
short requests decode all the time; long prompts arrive at fixed times, the same in every layout. The layouts run one after
the other, `--rounds` times over, with the same resources: on a CPU all cores for one engine, or a core each for two; on a card
the whole of it, or two processes that share it (start MPS before, and give the SM shares by --shares; each process takes its
part of the memory).
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import os
import random
import sys
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from stoker.base.config import EngineSettings, HandoffSettings, KvSettings, SchedSettings
from stoker.base.ids import RequestId
from stoker.sched.request import GenerateRequest, SamplingParams, TokenChunk

LAYOUTS = ("unchunked", "chunked", "apart")


@dataclass(frozen=True)
class EngineProcess:
    process: multiprocessing.process.BaseProcess
    pipe: Connection


def engine_main(pipe: Connection, model: str, settings: EngineSettings, dummy: bool, cores: list[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    from stoker.base.log import set_up
    from stoker.engine.llm import LLM

    set_up("warning")
    llm = LLM(model, settings, random_weights_seed=0 if dummy else None)
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
) -> EngineProcess:
    ours, theirs = multiprocessing.Pipe()
    if share is not None:
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = share
    process = multiprocessing.get_context("spawn").Process(
        target=engine_main, args=(theirs, args.model, settings, args.dummy, cores), daemon=True
    )
    process.start()
    os.environ.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", None)
    return EngineProcess(process, ours)


def engines_of(args: argparse.Namespace, layout: str) -> list[EngineProcess]:
    """The one that decodes comes last."""
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
        whole = replace(base, sched=replace(base.sched, step_tokens=step, mixed_tokens=step))
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
class Load:
    """What happens when, whatever the layout."""

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
class Seen:
    gaps: list[float] = field(default_factory=list)  # between tokens of the short requests
    ttfts: list[float] = field(default_factory=list)  # of the long ones
    tokens: int = 0
    started: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    requests: dict[str, GenerateRequest] = field(default_factory=dict)


def run(args: argparse.Namespace, engines: list[EngineProcess]) -> dict[str, Any]:
    load, seen, decode = Load(args), Seen(), engines[-1]
    begin = time.monotonic()
    arrivals = [begin + args.warm_s + args.every_s * i for i in range(int(args.seconds / args.every_s))]
    end = begin + args.warm_s + args.seconds
    heapq.heapify(arrivals)

    def start(request: GenerateRequest, to: EngineProcess) -> None:
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
            at, chunks = pipe.recv()  # type: ignore[union-attr]
            for chunk in chunks:
                take(args, seen, decode, at, chunk, begin, start_short)
    for engine in engines:
        engine.pipe.send(None)
    for engine in engines:
        engine.process.join(20)
        engine.process.kill()
    return figures(args, seen)


def take(
    args: Any, seen: Seen, decode: EngineProcess, at: float, chunk: TokenChunk, begin: float, start_short: Any
) -> None:
    request_id = chunk.request_id
    counts = at > begin + args.warm_s
    is_long = request_id.startswith("long")
    if chunk.finish is not None and chunk.finish.reason == "error":
        raise SystemExit(f"{request_id}: {chunk.finish.error_message}")
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


def share(values: list[float], part: float) -> float:
    return 1e3 * sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def figures(args: argparse.Namespace, seen: Seen) -> dict[str, Any]:
    return {
        "itl_ms": {f"p{part}": round(share(seen.gaps, part / 100), 2) for part in (50, 75, 90, 95, 99)},
        "itl_max_ms": round(1e3 * max(seen.gaps, default=0.0), 1),
        "long_ttft_ms": {name: round(share(seen.ttfts, part), 1) for name, part in (("p50", 0.5), ("p90", 0.9))},
        "long_prompts": len(seen.ttfts),
        "tokens_per_s": round(seen.tokens / args.seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--dummy", action="store_true", help="random weights of config.json's shape")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--warm-s", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--short-in", type=int, default=64)
    parser.add_argument("--short-out", type=int, default=96)
    parser.add_argument("--long-in", type=int, default=1024)
    parser.add_argument("--long-out", type=int, default=8)
    parser.add_argument("--every-s", type=float, default=6.0)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--max-model-tokens", type=int, default=4096)
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument(
        "--hand-over", choices=["long", "all"], default="long", help="whose prompts are computed apart from decoding"
    )
    parser.add_argument("--shares", help="SM percentages of prefill and decode under MPS, such as 70,100")
    args = parser.parse_args()
    args.vocab = min(48000, json.loads((Path(args.model) / "config.json").read_text())["vocab_size"])
    results: dict[str, list[dict[str, Any]]] = {layout: [] for layout in args.layouts.split(",")}
    for number in range(args.rounds):
        for layout, rounds in results.items():
            engines = engines_of(args, layout)
            for engine in engines:
                assert engine.pipe.recv() == "ready"
            rounds.append(run(args, engines))
            print(number, layout, json.dumps(rounds[-1]), flush=True)
    middle = {
        layout: {p: median(r["itl_ms"][p] for r in rounds) for p in ("p50", "p90", "p99")}
        for layout, rounds in results.items()
    }
    args.out.write_text(
        json.dumps(
            {"settings": {k: str(v) for k, v in vars(args).items()}, "rounds": results, "medians": middle}, indent=1
        )
    )
    print(json.dumps(middle))


if __name__ == "__main__":
    main()
