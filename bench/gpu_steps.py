"""Steps that have prompts in them, on a card: captured against launched kernel by kernel, on the card and on the host.

    python bench/gpu_steps.py OUT.json [--model DIR] [--decode] [--prefill] [--profile]

Without --model: Llama-3.1-8B's shape with random weights. A mixed step is 32 rows at 1,000 tokens and one chunk behind 4,096.
`ms` is the time of one step of a row of steps launched one after the other, `host_us` what launching one takes the host.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
from shapes import LLAMA_8B  # noqa: E402
from torch import Tensor  # noqa: E402

from stoker.base.config import EngineSettings, SchedSettings  # noqa: E402
from stoker.base.ids import BlockId, Row  # noqa: E402
from stoker.engine.llm import LLM  # noqa: E402
from stoker.sched.plan import BlockTableChange, NewRow, Span, StepPlan  # noqa: E402
from stoker.sched.request import SamplingParams  # noqa: E402

Figures = dict[str, float]


class StepBench:
    """Nobody but this bench uses the runner meanwhile."""

    def __init__(self, llm: LLM) -> None:
        self._built = llm.built
        self._runner = llm.built.engine._runner
        assert self._runner._gpu_steps is not None
        self._gpu_steps = self._runner._gpu_steps
        self._graphs = self._gpu_steps._graphs

    def step(self, spans: list[tuple[int, int]], sampling: SamplingParams, repeats: int = 20) -> Figures:
        """`spans`: tokens before, and tokens."""
        first, plan = self._plans(spans, sampling)
        for one in (first, plan, plan):
            self._runner.launch(one).wait()
        start, host = time.perf_counter(), 0.0
        before = None
        for _ in range(repeats):
            launched = time.perf_counter()
            step = self._runner.launch(plan)
            host += time.perf_counter() - launched
            if before is not None:  # one ahead, as the engine does
                before.wait()
            before = step
        step.wait()
        figures = {"ms": (time.perf_counter() - start) / repeats * 1e3, "host_us": host / repeats * 1e6}
        self._runner.launch(StepPlan([], [], freed_rows=[Row(row) for row in range(len(spans))])).wait()
        return figures

    def logits(self, spans: list[tuple[int, int]]) -> Tensor:
        first, plan = self._plans(spans, SamplingParams(temperature=0.0))
        self._runner.launch(first).wait()
        sampling = [span for span in plan.spans if span.samples]
        with torch.inference_mode():
            logits = self._gpu_steps.run(plan, False).logits
        assert logits is not None
        found = logits[: len(sampling)].float()
        self._runner.launch(StepPlan([], [], freed_rows=[Row(row) for row in range(len(spans))])).wait()
        return found

    def eagerly(self, run: Callable[[], Any]) -> Any:
        """With no shape captured."""
        kept = self._graphs._by_cost
        self._graphs._by_cost = []
        try:
            return run()
        finally:
            self._graphs._by_cost = kept

    def _plans(self, spans: list[tuple[int, int]], sampling: SamplingParams) -> tuple[StepPlan, StepPlan]:
        """A step that makes the rows, and the same one again."""
        block_tokens, next_block, changes, planned = self._built.layout.block_tokens, 0, [], []
        for number, (context, count) in enumerate(spans):
            blocks = -(-(context + count) // block_tokens)
            changes.append(BlockTableChange(Row(number), 0, [BlockId(next_block + i) for i in range(blocks)]))
            next_block += blocks
            planned.append(Span(Row(number), context, count, True))
        assert next_block <= self._built.pool.num_blocks
        new_rows = [NewRow(Row(number), sampling, [1], 1, 10) for number in range(len(spans))]
        token_ids = [7 + i % 1000 for i in range(sum(count for _, count in spans))]
        return StepPlan(planned, token_ids, new_rows=new_rows, block_table_changes=changes), StepPlan(
            planned, token_ids
        )


def say(name: str, figures: Figures) -> Figures:
    print(f"{name:28}" + " ".join(f"{key}={value:.4g}" for key, value in figures.items()), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--profile", action="store_true", help="what the host does in a launch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        start = time.time()
        settings = EngineSettings(max_model_tokens=32768, sched=SchedSettings(max_rows=512))
        llm = LLM(args.model or folder, settings, random_weights_seed=None if args.model else 0)
    bench = StepBench(llm)
    free_mib = torch.cuda.mem_get_info()[0] / 2**20
    results = {"start": say("start", {"s": time.time() - start, "free_mib": free_mib})}
    greedy, warm = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    for rows, chunk, context in [
        (32, 16, 4096), (32, 64, 4096), (32, 128, 4096), (32, 256, 4096), (32, 448, 4096), (32, 900, 4096),
        (0, 16, 0), (0, 128, 0), (0, 512, 0), (0, 64, 30000), (8, 300, 30000),
    ]:  # fmt: skip
        spans = [(1000, 1)] * rows + [(context, chunk)]
        name = f"{rows} rows + {chunk} at {context}"
        eager = bench.eagerly(lambda spans=spans: bench.step(spans, greedy, 6))
        captured = bench.step(spans, greedy)
        found, expected = bench.logits(spans), bench.eagerly(lambda spans=spans: bench.logits(spans))
        error = float((found - expected).abs().max() / expected.abs().max())
        # The rows that go on, in other company: what the matrix library's choices alone make of them.
        other = bench.eagerly(lambda spans=spans: bench.logits([*spans[:-1], (0, 64)]))[:-1]
        noise = float((other - expected[:-1]).abs().max() / expected.abs().max()) if rows else 0.0
        eager = {f"eager_{key}": value for key, value in eager.items()}
        results[name] = say(name, {**captured, **eager, "logits_error": error, "noise": noise})
    if args.decode:
        for rows in (1, 8, 64, 256):
            results[f"decode {rows}"] = say(f"decode {rows}", bench.step([(257, 1)] * rows, greedy, 40))
            results[f"top_p {rows}"] = say(f"decode {rows}, top_p", bench.step([(257, 1)] * rows, warm))
        ragged = [(30000 if row == 0 else 1000, 1) for row in range(64)]
        results["ragged 64"] = say("63 at 1,000, one at 30,000", bench.step(ragged, greedy))
    if args.prefill:
        for name, spans in [("8k", [(0, 8192)]), ("2 x 4k", [(0, 4096)] * 2), ("2k", [(0, 2048)]), ("1k", [(0, 1024)])]:
            results[name] = say(f"prefill {name}", bench.step(spans, greedy, 5))
    if args.profile:
        for name, spans in [("decode 256", [(257, 1)] * 256), ("2k", [(0, 2048)])]:
            profile = cProfile.Profile()
            profile.enable()
            bench.step(spans, greedy, 10)
            profile.disable()
            print(name)
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)
    args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
