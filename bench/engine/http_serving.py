"""Serving over HTTP on one GPU: throughput, latency and the server's CPU time under several loads.

    python -m bench make-model DIR --tokenizer SOME_MODEL_DIR --weights
    python -m bench run http_serving DIR --server vllm --details vllm.json
    python -m bench run http_serving DIR --competitor vllm.json --save

Run the servers one after the other on the same machine. The loads are those of `vllm bench serve`, with random lengths
within 80% of the mean: 1, 64 and 200 streams of 512 tokens in and 256 out, 512 streams of 1,024 in and 128 out, 8 of
4,096 in and 64 out. `--client own` is a plain client for machines without vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.contract import Better, Needs, Report, Result
from bench.support.gpu_server import MODEL, PORT, SERVERS, GpuServer

if TYPE_CHECKING:
    import aiohttp

NAME = "http_serving"
HELP = "throughput, TTFT, time between tokens and server CPU over HTTP on one GPU; Stoker or vLLM"
NEEDS = Needs(
    gpu=True, packages=("torch", "msgspec", "aiohttp", "uvloop"), programs="vLLM for --server vllm and --client vllm"
)


@dataclass(frozen=True, slots=True)
class StreamLoad:
    streams: int
    tokens_in: int
    tokens_out: int
    num_requests: int

    def describe(self) -> str:
        streams = "1 stream" if self.streams == 1 else f"{self.streams} streams"
        return f"{streams}, {self.tokens_in:,} in, {self.tokens_out} out"


LOADS = {
    1: StreamLoad(1, 512, 256, 10),
    8: StreamLoad(8, 4096, 64, 48),
    64: StreamLoad(64, 512, 256, 256),
    200: StreamLoad(200, 512, 256, 800),
    512: StreamLoad(512, 1024, 128, 1024),
}
_METRICS: dict[str, tuple[str, str, Better]] = {
    "request_throughput": ("throughput", "requests/s", "higher"),
    "median_ttft_ms": ("TTFT p50", "ms", "lower"),
    "p99_ttft_ms": ("TTFT p99", "ms", "lower"),
    "median_itl_ms": ("time between tokens p50", "ms", "lower"),
    "p99_itl_ms": ("time between tokens p99", "ms", "lower"),
    "cpu_s_per_1k": ("server CPU per 1,000 output tokens", "s", "lower"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a model folder, such as make-model writes")
    parser.add_argument("--server", choices=SERVERS, default="stoker", help="default: %(default)s")
    parser.add_argument("--client", choices=("vllm", "own"), default="vllm", help="default: %(default)s")
    parser.add_argument("--competitor", type=Path, metavar="FILE", help="the --details of another server's run")
    parser.add_argument("--loads", default="1,64,200,512", help="numbers of streams (default: %(default)s)")
    parser.add_argument("--share", type=float, default=1.0, help="send this share of the requests")
    parser.add_argument("--context", type=int, default=16384, help="default: %(default)s")
    parser.add_argument("--serve", default="", help="more arguments of the server, as one string")
    parser.add_argument("--log", type=Path, default=Path("build/http_serving.log"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    if args.client == "vllm":
        import vllm.benchmarks.serve  # noqa: F401  # before the clock starts: this takes longer than Stoker's start
    args.log.parent.mkdir(parents=True, exist_ok=True)
    server = GpuServer(args.server, args.folder, args.context, shlex.split(args.serve), args.log)
    found: dict[str, Any] = {"server": args.server}
    problems = []
    try:
        found["first_token_s"] = server.first_token_s()
        found["settling_cpu_s"] = server.settle()
        print(f"{args.server}: first token after {found['first_token_s']:.2f} s", flush=True)
        for seed, streams in enumerate(map(int, args.loads.split(",")), 1):  # no prompt is sent twice
            load = replace(LOADS[streams], num_requests=round(LOADS[streams].num_requests * args.share))
            try:
                found[f"c{streams}"] = _one_load(args, server, load, seed)
            except Exception as error:  # the other loads are still worth measuring
                problems.append(f"{load.describe()}: {error!r}")
    finally:
        server.stop()
    competitor = json.loads(args.competitor.read_text()) if args.competitor else {}
    return Report(_results(args.folder.name, found, competitor), found, problems)


def _one_load(args: argparse.Namespace, server: GpuServer, load: StreamLoad, seed: int) -> dict[str, Any]:
    before = server.cpu_s()
    if args.client == "own":
        measured = asyncio.run(_own_client(args.folder, load, seed))
    else:
        measured = _vllm_client(args.folder, load, seed)
    cpu = {name: seconds - before.get(name, 0.0) for name, seconds in server.cpu_s().items()}
    measured["cpu_s"] = sum(cpu.values())
    measured["cpu_s_per_1k"] = measured["cpu_s"] / measured["total_output_tokens"] * 1e3
    print(f"{args.server}, {load.describe()}: {json.dumps({k: round(v, 4) for k, v in measured.items()})}", flush=True)
    return {**measured, "cpu_by_process": {name: seconds for name, seconds in cpu.items() if seconds > 0.2}}


def _results(model: str, found: dict[str, Any], competitor: dict[str, Any]) -> list[Result]:
    name = competitor.get("server", "")
    made = []
    for streams, load in LOADS.items():
        ours, theirs = found.get(f"c{streams}", {}), competitor.get(f"c{streams}", {})
        for key, (metric, unit, better) in _METRICS.items():
            if key in ours:
                other = name if key in theirs else ""
                case = f"{model}, {load.describe()}"
                made.append(Result(case, metric, unit, ours[key], better, other, theirs.get(key)))
    return made


async def _own_client(folder: Path, load: StreamLoad, seed: int) -> dict[str, float]:
    """Streams that each send the next request when the last one is answered."""
    import aiohttp
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, rng.randint(int(mean * 0.2), int(mean * 1.8)))

    requests = []
    for _ in range(load.num_requests):
        ids = [rng.randrange(1000, 40000) for _ in range(length(load.tokens_in))]
        requests.append((tokenizer.decode(ids), length(load.tokens_out)))
    ttft: list[float] = []
    itl: list[float] = []
    num_tokens = 0

    async def stream(session: aiohttp.ClientSession) -> None:
        nonlocal num_tokens
        while requests:
            prompt, tokens_out = requests.pop()
            body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens_out, "temperature": 0, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            begun = last = time.perf_counter()
            first = True
            async with session.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"{answer.status}: {await answer.text()}")
                async for data in answer.content.iter_any():
                    now = time.perf_counter()
                    for _ in range(data.count(b'"text":')):
                        if first:
                            ttft.append(now - begun)
                            first = False
                        else:
                            itl.append(now - last)
                        last = now
            num_tokens += tokens_out

    begun = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=600)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(load.streams):
            group.create_task(stream(session))
    seconds = time.perf_counter() - begun

    def percentile_ms(values: list[float], share: float) -> float:
        return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e3

    return {
        "duration": seconds,
        "request_throughput": load.num_requests / seconds,
        "output_throughput": num_tokens / seconds,
        "total_output_tokens": num_tokens,
        "median_ttft_ms": median(ttft) * 1e3,
        "p99_ttft_ms": percentile_ms(ttft, 0.99),
        "median_itl_ms": median(itl) * 1e3,
        "p99_itl_ms": percentile_ms(itl, 0.99),
    }


def _vllm_client(folder: Path, load: StreamLoad, seed: int) -> dict[str, float]:
    """`vllm bench serve` in this process: importing it takes longer than a load."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args(
        f"--backend openai --port {PORT} --model {folder} --served-model-name {MODEL} --dataset-name random "
        f"--random-input-len {load.tokens_in} --random-output-len {load.tokens_out} --random-range-ratio 0.8 "
        f"--num-prompts {load.num_requests} --max-concurrency {load.streams} --ignore-eos --temperature 0 --seed {seed} "
        f"--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,99 --num-warmups {min(8, load.streams)}".split()
    )
    found = main(args)
    wanted: tuple[str, ...] = (
        "duration",
        "completed",
        "total_output_tokens",
        "request_throughput",
        "output_throughput",
    )
    wanted += tuple(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("median", "p99"))
    return {name: found[name] for name in wanted if name in found}
