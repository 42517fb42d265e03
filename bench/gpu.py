"""A card's figures: steps, the kernels of one decode step, and how long a step takes by rows, tokens and context.

    python bench/gpu.py OUT.json [--model DIR | --shape NAME] [--steps] [--mix] [--peer PEER.json] [--kernels]
                        [--calibrate FILE] [--tiles]

Without --model: a published shape with random weights, llama8b (Llama-3.1-8B) or qwen30a3b (Qwen3-30B-A3B); -fp8, -blocks and
-int4: quantised; qwen30a3b-experts-int4: only the experts are, as in Kimi K2. --steps is bench/engine.py's workload and keys,
which are also the peers'. --kernels profiles replays of a decode step. --tiles times the candidates for the tiles of
kernels/skinny.py, or of a layer of experts (gpu_moe.py) in that shape's kind of weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
_started = time.time()

import gpu_moe  # noqa: E402
import torch  # noqa: E402
from engine import Workload  # noqa: E402
from gpu_quant import QUANTISED  # noqa: E402
from replay import graph_s  # noqa: E402
from shapes import PLAIN, QWEN_30B_A3B  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import linear  # noqa: E402

from stoker.base.config import EngineSettings, SchedSettings  # noqa: E402
from stoker.base.ids import BlockId, Row  # noqa: E402
from stoker.engine.llm import LLM  # noqa: E402
from stoker.kernels.sample_rows import pack_settings, sample_rows_triton  # noqa: E402
from stoker.kernels.skinny import SkinnyTile, few_rows_linear, one_row_linear  # noqa: E402
from stoker.sched.plan import BlockTableChange, NewRow, Span, StepPlan  # noqa: E402
from stoker.sched.request import SamplingParams  # noqa: E402

_import_s = time.time() - _started

SHAPES = PLAIN | {
    f"{shape}-{name}": {**hf, "quantization_config": said}
    for shape, hf in PLAIN.items()
    for name, said in QUANTISED.items()
}
SHAPES["qwen30a3b-experts-int4"] = {
    **QWEN_30B_A3B, "quantization_config": {**QUANTISED["int4"], "ignore": ["lm_head", "re:.*self_attn.*"]}
}  # fmt: skip
BATCHES = (1, 8, 64, 256)


class Bench:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._runner = llm.built.engine._runner
        self._work = Workload(llm)

    def steps(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for batch in BATCHES:
            step = self._work.decode_step(batch, 256)
            figures |= _say(**{f"decode_b{batch}_ms": step * 1e3, f"decode_b{batch}_toks": batch / step})
        self._work.seconds(8, 4096, 1)
        figures |= _say(prefill_4k_toks=16 * 4096 / min(self._work.seconds(16, 4096, 1) for _ in range(3)))
        return figures | _say(ttft_8k_ms=min(self._work.seconds(1, 8192, 1) for _ in range(3)) * 1e3)

    def mix(self) -> dict[str, float]:
        cpu_s, mix_s = time.process_time(), self._work.seconds(512, 1024, 256)
        cpu_s = time.process_time() - cpu_s
        figures = {"mix_512x1024x256_out_toks": 512 * 256 / mix_s, "mix_s": mix_s, "mix_cpu_s_per_1k": cpu_s / 131.072}
        return _say(**figures)

    def decode_plan(self, num_rows: int, context: int, is_new: bool) -> StepPlan:
        """Every row at `context` tokens, each with blocks of its own. Nobody but this bench uses the runner meanwhile."""
        block_tokens = self._llm.built.layout.block_tokens
        per_row = context // block_tokens + 1
        rows = [Row(row) for row in range(num_rows)]
        new_rows = [NewRow(row, SamplingParams(temperature=0.0), [1], 1, 10) for row in rows] if is_new else []
        changes = [
            BlockTableChange(row, 0, [BlockId(row * per_row + i) for i in range(per_row)]) for row in rows if is_new
        ]
        spans = [Span(row, context, 1, True) for row in rows]
        # Tokens apart, so that rows have experts of their own.
        return StepPlan(spans, [7 + 11 * row for row in rows], new_rows=new_rows, block_table_changes=changes)

    def decode_s(self, num_rows: int, context: int, repeats: int = 20) -> float:
        """Steps launched one after the other, as the engine does: the card is what they take turns at."""
        self._runner.launch(self.decode_plan(num_rows, context, True)).wait()
        plan = self.decode_plan(num_rows, context, False)
        self._runner.launch(plan).wait()
        start = time.perf_counter()
        for step in [self._runner.launch(plan) for _ in range(repeats)]:
            step.wait()
        seconds = (time.perf_counter() - start) / repeats
        self._free(num_rows)
        return seconds

    def chunk_s(self, num_tokens: int, context: int, repeats: int = 3) -> float:
        """One span of `num_tokens` behind `context` tokens."""
        block_tokens = self._llm.built.layout.block_tokens
        blocks = [BlockId(i) for i in range((context + num_tokens) // block_tokens + 1)]
        new = NewRow(Row(0), SamplingParams(temperature=0.0), [1], 1, 10)
        token_ids = [7 + i % 1000 for i in range(num_tokens)]
        span = Span(Row(0), context, num_tokens, True)
        first = StepPlan([span], token_ids, new_rows=[new], block_table_changes=[BlockTableChange(Row(0), 0, blocks)])
        self._runner.launch(first).wait()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._runner.launch(StepPlan([span], token_ids)).wait()
            times.append(time.perf_counter() - start)
        self._free(1)
        return median(times)

    def _free(self, num_rows: int) -> None:
        self._runner.launch(StepPlan([], [], freed_rows=[Row(row) for row in range(num_rows)])).wait()

    def calibrate(self) -> dict[str, Any]:
        num_blocks = self._llm.built.pool.num_blocks
        block_tokens = self._llm.built.layout.block_tokens
        decode = [
            {"rows": rows, "context": context, "ms": self.decode_s(rows, context, 10) * 1e3}
            for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
            for context in (128, 1024, 4096, 15000)
            if rows * (context // block_tokens + 1) <= num_blocks
        ]
        chunks = [
            {"tokens": tokens, "context": context, "ms": self.chunk_s(tokens, context) * 1e3}
            for tokens in (16, 64, 256, 512, 1024, 2048, 4096, 8192)
            for context in (0, 4096, 8000)
            if context + tokens < 16384
        ]
        return {"device": torch.cuda.get_device_name(), "decode": decode, "chunks": chunks}

    def kernels(self, num_rows: int, context: int) -> list[dict[str, Any]]:
        """Time on the card by kernel, of one step."""
        self._runner.launch(self.decode_plan(num_rows, context, True)).wait()
        plan = self.decode_plan(num_rows, context, False)
        repeats = 5
        self._runner.launch(plan).wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(repeats):
                self._runner.launch(plan).wait()
        self._free(num_rows)
        table = [
            {"kernel": event.key[:70], "calls": event.count / repeats, "us": event.self_device_time_total / repeats}
            for event in profile.key_averages()
            if event.self_device_time_total
        ]
        return sorted(table, key=lambda line: -line["us"])


def _say(**figures: float) -> dict[str, float]:
    print(" ".join(f"{name}={value:.2f}" for name, value in figures.items()), flush=True)
    return figures


def tiles(num_rows: int, candidates: list[SkinnyTile]) -> list[dict[str, Any]]:
    """The products of a layer, and the head. Enough copies of each weight that the cache holds none."""
    products = [
        ("qkv", 6144, 4096),
        ("out", 4096, 4096),
        ("gate_up", 28672, 4096),
        ("down", 4096, 14336),
        ("head", 128256, 4096),
    ]
    run = one_row_linear if num_rows == 1 else few_rows_linear
    lines = []
    for name, outs, ins in products:
        weights = [
            torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16) * 0.02
            for _ in range(max(2, 400_000_000 // (outs * ins * 2)))
        ]
        x = torch.randn(num_rows, ins, device="cuda", dtype=torch.bfloat16)

        def line(
            tile: SkinnyTile | None, x: Tensor = x, weights: list[Tensor] = weights, name: str = name
        ) -> dict[str, Any]:
            calls = [
                partial(linear, x, weight) if tile is None else partial(run, x, weight, tile=tile) for weight in weights
            ]
            seconds, num_bytes = graph_s(calls), weights[0].numel() * 2
            figures = {"us": seconds * 1e6, "GB/s": num_bytes / seconds / 1e9}
            return {"product": name, "rows": num_rows, "tile": "cublas" if tile is None else str(tile), **figures}

        mine = sorted((line(tile) for tile in [None, *candidates]), key=lambda line: line["us"])
        for found in mine[:4] + [found for found in mine[4:] if found["tile"] == "cublas"]:
            print(
                f"{name:8} {num_rows:3} {found['tile']:60} {found['us']:8.1f} us {found['GB/s']:6.0f} GB/s", flush=True
            )
        lines += mine
    return lines


def sampling() -> dict[str, float]:
    """Drawing a token for each row of Llama-3.1-8B's vocabulary, by what the rows ask for."""
    figures = {}
    device = torch.device("cuda")
    for num_rows in BATCHES:
        logits = torch.randn(num_rows, 128256, device=device, dtype=torch.bfloat16) * 3
        rows, lengths = torch.arange(num_rows, device=device), torch.full((num_rows,), 300, device=device)
        last_token = torch.zeros(num_rows, dtype=torch.int64, device=device)
        for name, top_k, temperature, top_p in [
            ("greedy", 0, 0.0, 1.0),
            ("warm", 0, 1.0, 1.0),
            ("top_p", 0, 1.0, 0.95),
            ("top_k", 40, 1.0, 0.95),
        ]:
            settings = torch.tensor([pack_settings(5, top_k, temperature, top_p, 0.0)] * num_rows, device=device)
            call = partial(sample_rows_triton, logits, rows, lengths, settings, last_token)
            figures[f"sample_{name}_b{num_rows}_us"] = graph_s([call] * 3) * 1e6
    return _say(**figures)


def compare(ours: dict[str, Any], peers: dict[str, Any]) -> None:
    for name in sorted(ours.keys() & peers.keys()):
        if name.endswith(("_ms", "_toks")):
            ratio = peers[name] / ours[name] if name.endswith("_ms") else ours[name] / peers[name]
            print(f"{name:28} {ours[name]:10.2f} {peers[name]:10.2f} {ratio:6.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--mix", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--calibrate", type=Path)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--peer", type=Path, help="a peer's figures of the same run, by the same keys")
    args = parser.parse_args()
    results: dict[str, Any] = {"import_s": _import_s}
    if args.tiles and "num_experts" in SHAPES[args.shape]:
        kind = args.shape.rpartition("-")[2]
        results["tiles"] = gpu_moe.tiles(gpu_moe.Shape(), kind if kind in QUANTISED else "bf16")
        for line in results["tiles"]:
            print(" ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in line.values()))
    elif args.tiles:
        one = [
            SkinnyTile(outs, ins, 4, stages) for outs, ins in ((8, 256), (8, 512), (16, 256)) for stages in (1, 3, 4)
        ]
        one += [SkinnyTile(4, 512, 4, 4), SkinnyTile(8, 512, 8, 1), SkinnyTile(8, 512, 8, 3)]
        few = [SkinnyTile(64, ins, 4, stages) for ins, stages in ((128, 4), (128, 6), (256, 4), (256, 5))]
        few += [SkinnyTile(32, 512, 4, 4), SkinnyTile(64, 128, 4, 4, splits=2), SkinnyTile(64, 256, 4, 4, splits=4)]
        more = [
            SkinnyTile(64, 128, 4, 6),
            SkinnyTile(128, 128, 8, 4),
            *(SkinnyTile(64, 128, 4, 4, splits) for splits in (1, 2, 4)),
        ]
        results["tiles"] = tiles(1, one) + tiles(8, few) + tiles(64, more)
    if args.steps or args.mix or args.kernels or args.calibrate:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
            start = time.time()
            settings = EngineSettings(max_model_tokens=16384, sched=SchedSettings(max_rows=512))
            llm = LLM(args.model or folder, settings, random_weights_seed=None if args.model else 0)
        results["init_s"] = time.time() - start
        bench = Bench(llm)
        results["kv_gib"] = llm.built.pool.num_blocks * llm.built.layout.block_bytes / 2**30
        _say(**{name: value for name, value in results.items() if name.endswith(("_s", "gib"))})
        if args.steps:
            results |= bench.steps()
        if args.mix:
            results |= bench.mix()
        if args.kernels:
            for rows in BATCHES:
                results[f"kernels_b{rows}"] = bench.kernels(rows, 256)
                step_ms = bench.decode_s(rows, 256) * 1e3
                print(f"batch {rows}: {step_ms:.3f} ms a step", flush=True)
                for line in results[f"kernels_b{rows}"][:14]:
                    print(f"  {line['us']:9.1f} us {line['calls']:6.0f} x {line['kernel']}", flush=True)
            results |= sampling()
        if args.calibrate:
            args.calibrate.write_text(json.dumps(bench.calibrate(), indent=1))
        free, _total = torch.cuda.mem_get_info()
        results |= {"free_gib": free / 2**30, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    if args.peer:
        compare(results, json.loads(args.peer.read_text()))
    args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
