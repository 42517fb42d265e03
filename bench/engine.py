"""Our engine on this machine: start time, memory left for KV, step times. The same workload and JSON keys as peers' benchmarks use.

    python bench/engine.py MODEL_DIR auto|dummy OUT.json [--device cuda] [--small]

A decode step is the difference between 272 and 16 output tokens over 256, from 128-token prompts, greedy; prefill is 16
prompts of 4,096 tokens with one token out; the mix is 512 requests of 1,024 in and 256 out at once. Prompts are random, so
nothing is found in the prefix cache. `dummy` takes random weights of config.json's shape. `--small` scales the workload down
for CPUs; its figures are named by what they measured.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
_started = time.time()

import torch  # noqa: E402

from stoker.base.config import EngineSettings, KvSettings, SchedSettings  # noqa: E402
from stoker.engine.llm import LLM  # noqa: E402
from stoker.sched.request import SamplingParams  # noqa: E402

_import_s = time.time() - _started


class Workload:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._rng = random.Random(0)
        self._vocab = min(48000, llm.built.vocab_size)

    def seconds(self, count: int, num_in: int, num_out: int) -> float:
        prompts = [[self._rng.randrange(10, self._vocab) for _ in range(num_in)] for _ in range(count)]
        start = time.perf_counter()
        done = self._llm.generate(prompts, SamplingParams(temperature=0.0), max_new_tokens=num_out)
        elapsed = time.perf_counter() - start
        assert all(len(completion.token_ids) == num_out for completion in done)
        return elapsed

    def decode_step(self, batch: int, num_out: int, repeats: int = 2) -> float:
        self.seconds(batch, 128, 8)
        short = min(self.seconds(batch, 128, 16) for _ in range(repeats))
        long = min(self.seconds(batch, 128, 16 + num_out) for _ in range(repeats))
        return (long - short) / num_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("load_format", choices=["auto", "dummy"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-model-tokens", type=int, default=16384)
    parser.add_argument("--kv-memory-gib", type=float)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()

    config = json.loads((Path(args.model) / "config.json").read_text())
    settings = EngineSettings(
        device=args.device,
        dtype=args.dtype,
        num_threads=args.threads,
        max_model_tokens=min(args.max_model_tokens, config["max_position_embeddings"]),
        kv=KvSettings(memory_gib=args.kv_memory_gib),
        sched=SchedSettings(max_rows=max(args.batches)),
    )
    start = time.time()
    llm = LLM(args.model, settings, random_weights_seed=0 if args.load_format == "dummy" else None)
    work = Workload(llm)
    results: dict[str, Any] = {"import_s": _import_s, "init_s": time.time() - start}
    results["first_token_s"] = work.seconds(1, 32, 1)
    results["kv_blocks"], results["block_size"] = llm.built.pool.num_blocks, llm.built.layout.block_tokens
    results["kv_gib"] = llm.built.pool.num_blocks * llm.built.layout.block_bytes / 2**30
    results["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    def say(**figures: float) -> None:
        results.update(figures)
        print(" ".join(f"{name}={value:.2f}" for name, value in figures.items()), flush=True)

    num_out = 32 if args.small else 256
    for batch in args.batches:
        step = work.decode_step(batch, num_out, 1 if args.small else 2)
        say(**{f"decode_b{batch}_ms": step * 1e3, f"decode_b{batch}_toks": batch / step})
    if args.small:
        say(prefill_512_toks=4 * 512 / work.seconds(4, 512, 1), ttft_2k_ms=work.seconds(1, 2048, 1) * 1e3)
        mix = work.seconds(16, 256, 64)
        say(mix_16x256x64_out_toks=16 * 64 / mix, mix_s=mix)
    else:
        work.seconds(8, 4096, 1)
        say(prefill_4k_toks=16 * 4096 / min(work.seconds(16, 4096, 1) for _ in range(3)))
        # A model made for 8,192 tokens has no place for the token after a prompt of as many.
        eight_k = min(8192, llm.built.max_model_tokens - 1)
        say(ttft_8k_ms=min(work.seconds(1, eight_k, 1) for _ in range(3)) * 1e3)
        mix = work.seconds(512, 1024, 256)
        say(mix_512x1024x256_out_toks=512 * 256 / mix, mix_s=mix)
    args.out.write_text(json.dumps(results, indent=1))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
