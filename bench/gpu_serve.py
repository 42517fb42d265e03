"""Serving over HTTP on one card: a server under three loads, with its CPU seconds. Run once for each server, one after the other.

    python bench/gpu_serve.py model DIR --tokenizer DIR [--shape qwen30a3b] [--weights]     # behind any tokenizer
    python bench/gpu_serve.py run DIR OUT.json --server stoker [--client own] [--loads 1,200,512]
    PYTHONPATH=SITE python bench/gpu_serve.py run DIR OUT.json --server vllm

The loads are `vllm bench serve`'s, random lengths within 80% of the mean: 1, 64 and 200 streams of 512 tokens in and 256 out, 512
streams of 1,024 in and 128 out, 8 of 4,096 in and 64 out. --client own is a plain client of our own for where vLLM is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from shapes import PLAIN

ROOT = Path(__file__).parents[1]
PORT = 23000
NAME = "bench"
STARTS_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    tokens_in: int
    tokens_out: int
    num_requests: int


LOADS = {
    1: Load(1, 512, 256, 10),
    8: Load(8, 4096, 64, 48),
    64: Load(64, 512, 256, 256),
    200: Load(200, 512, 256, 800),
    512: Load(512, 1024, 128, 1024),
}


def make_model(folder: Path, shape: dict[str, Any], tokenizer: Path, with_weights: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "tokenizer_config.json").write_text((tokenizer / "tokenizer_config.json").read_text())
    words = json.loads((tokenizer / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    # Random weights say any token of the vocabulary: those that the tokenizer lacks are made up, so that each is some text.
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ("Ġq" + "".join(each) for each in product(letters, repeat=4))
    while len(vocab) < shape["vocab_size"]:
        name = next(names)
        vocab.setdefault(name, len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(words))
    if with_weights:
        write_weights(folder)


def write_weights(folder: Path) -> None:
    """Of config.json's shape, in files of some 4 GB."""
    import torch
    from safetensors.torch import save_file

    device, files, names = "cuda" if torch.cuda.is_available() else "cpu", 0, {}
    torch.manual_seed(0)
    part: dict[str, torch.Tensor] = {}

    def flush() -> None:
        nonlocal files, part
        file = f"model-{files:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(part, file))
        files, part = files + 1, {}

    for name, size in _tensors(folder):
        if len(size) == 1:
            part[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            part[name] = (torch.randn(size, device=device, dtype=torch.bfloat16) * 0.02).cpu()
        if sum(tensor.nbytes for tensor in part.values()) > 4e9:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _tensors(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """A checkpoint's names and shapes, as the family says."""
    import torch

    sys.path.insert(0, str(ROOT))
    from stoker.engine.build import read_hf_config
    from stoker.models.family import family_of
    from stoker.models.weights import parameter_slices

    family = family_of(read_hf_config(folder), str(folder))
    with torch.device("meta"):
        model = family.build(64)
    return [(name, tuple(place.shape)) for name, place in parameter_slices(model, family.rules)]


_QUIET_S = 3.0  # ours goes on with its preparations after up to 2


class Server:
    """A server's processes, from the start to the first token and under load."""

    def __init__(self, kind: str, folder: Path, context: int, arguments: list[str], log: Path) -> None:
        commands = {
            "stoker": [
                "-m",
                "stoker.cli.main",
                "serve",
                str(folder),
                "--served-name",
                NAME,
                "--no-events",
                "--timeline",
            ],
            "vllm": ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", NAME],
        }
        limit = {"stoker": "--max-model-tokens", "vllm": "--max-model-len"}[kind]
        command = [sys.executable, *commands[kind], "--port", str(PORT), limit, str(context), *arguments]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        self.started_s = time.time()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def first_token_s(self) -> float:
        """From the process's start."""
        body = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        while time.time() - self.started_s < STARTS_WITHIN_S:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}")
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    answer.read()
                    return time.time() - self.started_s
            except OSError:
                time.sleep(0.02)
        raise SystemExit(f"no token within {STARTS_WITHIN_S:g} s")

    def settle(self) -> float:
        """Until it does no more by itself, such as to prepare for loads to come; its CPU seconds for that."""
        before = last = sum(self.cpu_s().values())
        quiet_s = 0.0
        for _ in range(60):
            time.sleep(0.5)
            now = sum(self.cpu_s().values())
            quiet_s = quiet_s + 0.5 if now - last < 0.05 else 0.0
            if quiet_s >= _QUIET_S:
                break
            last = now
        return now - before

    def cpu_s(self) -> dict[str, float]:
        """Of each process under it, by its number."""
        return {f"{pid}:{name}": seconds for pid, name, seconds in _tree(self.process.pid)}

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _tree(root: int) -> list[tuple[int, str, float]]:
    stats: dict[int, tuple[int, str, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        ticks = sum(map(int, fields[11:15]))  # its own and its ended children's
        stats[int(path.parent.name)] = (int(fields[1]), name, ticks / os.sysconf("SC_CLK_TCK"))
    found, new = [], [root]
    while new:
        pid = new.pop()
        if pid in stats:
            found.append((pid, stats[pid][1], stats[pid][2]))
            new += [child for child, (parent, _, _) in stats.items() if parent == pid]
    return found


async def own_client(folder: Path, load: Load, seed: int) -> dict[str, float]:
    """Streams that each send their next request when the last is answered."""
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
            body = {"model": NAME, "prompt": prompt, "max_tokens": tokens_out, "temperature": 0, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            begun = last = time.perf_counter()
            first = True
            async with session.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise SystemExit(f"{answer.status}: {await answer.text()}")
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

    def at(values: list[float], share: float) -> float:
        return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e3

    return {
        "duration": seconds,
        "request_throughput": load.num_requests / seconds,
        "output_throughput": num_tokens / seconds,
        "total_output_tokens": num_tokens,
        "median_ttft_ms": median(ttft) * 1e3,
        "p99_ttft_ms": at(ttft, 0.99),
        "median_itl_ms": median(itl) * 1e3,
        "p99_itl_ms": at(itl, 0.99),
    }


def vllm_client(folder: Path, load: Load, seed: int) -> dict[str, float]:
    """`vllm bench serve` in this process: importing it takes longer than a load."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args(
        f"--backend openai --port {PORT} --model {folder} --served-model-name {NAME} --dataset-name random "
        f"--random-input-len {load.tokens_in} --random-output-len {load.tokens_out} --random-range-ratio 0.8 "
        f"--num-prompts {load.num_requests} --max-concurrency {load.streams} --ignore-eos --temperature 0 --seed {seed} "
        f"--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,99 --num-warmups {min(8, load.streams)}".split()
    )
    result = main(args)
    wanted = ("duration", "completed", "total_output_tokens", "request_throughput", "output_throughput")
    wanted += tuple(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("median", "p99"))
    return {name: result[name] for name in wanted if name in result}


def run(args: argparse.Namespace) -> None:
    results: dict[str, Any] = {"server": args.server}
    if args.client == "vllm" and args.server != "vllm":
        import vllm.benchmarks.serve  # before the clock runs: it takes longer than our start
    server = Server(args.server, args.folder, args.context, shlex.split(args.serve), args.out.with_suffix(".log"))
    try:
        if args.client == "vllm":
            import vllm.benchmarks.serve  # noqa: F401  # while its server starts
        results["first_token_s"] = server.first_token_s()
        results["settling_cpu_s"] = server.settle()
        print(
            f"{args.server}: first token after {results['first_token_s']:.2f} s; "
            f"CPU {results['settling_cpu_s']:.1f} s until it was quiet",
            flush=True,
        )
        for seed, streams in enumerate(map(int, args.loads.split(",")), 1):  # no prompt comes twice
            load = replace(LOADS[streams], num_requests=round(LOADS[streams].num_requests * args.share))
            before = server.cpu_s()
            try:
                if args.client == "own":
                    figures = asyncio.run(own_client(args.folder, load, seed))
                else:
                    figures = vllm_client(args.folder, load, seed)
            except Exception as error:  # the other loads are still worth having
                print(f"{args.server} c={streams}: {error!r}", flush=True)
                continue
            after = server.cpu_s()
            cpu = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
            figures["cpu_s"] = sum(cpu.values())
            figures["cpu_s_per_1k"] = figures["cpu_s"] / figures["total_output_tokens"] * 1e3
            results[f"c{streams}"] = {**figures, "cpu_by_process": {k: v for k, v in cpu.items() if v > 0.2}}
            said = {name: round(value, 4) for name, value in figures.items()}
            print(f"{args.server} c={streams}: {json.dumps(said)}", flush=True)
            print(f"  CPU s: {results[f'c{streams}']['cpu_by_process']}", flush=True)
    finally:
        server.stop()
        args.out.write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("model")
    making.add_argument("folder", type=Path)
    making.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
    making.add_argument("--shape", choices=PLAIN, default="llama8b")
    making.add_argument("--weights", action="store_true", help="random ones on the drive: 16 GB, or 61 of qwen30a3b")
    making.set_defaults(run=lambda args: make_model(args.folder, PLAIN[args.shape], args.tokenizer, args.weights))
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--server", choices=["stoker", "vllm"], default="stoker")
    running.add_argument("--client", choices=["vllm", "own"], default="vllm")
    running.add_argument("--loads", default="1,64,200,512")
    running.add_argument("--share", type=float, default=1.0, help="of the requests")
    running.add_argument("--context", type=int, default=16384)
    running.add_argument("--serve", default="", help="further arguments of the server, as one text")
    running.set_defaults(run=run)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
