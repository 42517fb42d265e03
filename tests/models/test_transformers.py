"""The logits of our models are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import SHAPES, make_tiny

from stoker.base.config import EngineSettings, KvSettings
from stoker.base.ids import BlockId, Row
from stoker.engine.build import BuiltEngine, build_engine
from stoker.engine.grammar import NoGrammars
from stoker.engine.inputs import build_inputs
from stoker.engine.rows import RowTable
from stoker.kv.device.device_kv import DeviceKv
from stoker.sched.plan import BlockTableChange, NewRow, Span, StepPlan
from stoker.sched.request import SamplingParams


@torch.inference_mode()
def prompt_logits(built: BuiltEngine, token_ids: list[int], chunk: int, grid_heads: int | None = None) -> torch.Tensor:
    """Return the logits at every position, computed `chunk` tokens at a time through the paged cache, with blocks in
    odd places. `grid_heads`: the number of query heads, for 8-bit weights on a CPU."""
    layout = built.layout
    num_blocks = -(-len(token_ids) // layout.block_tokens)
    blocks = [BlockId(2 * i + 1) for i in reversed(range(num_blocks))]
    kv = DeviceKv(layout, 2 * num_blocks + 1, torch.device("cpu"))
    num_sets = len(kv.sets)
    for kv_set, memory in enumerate(kv.sets):
        memory.blocks.fill_(float("nan"))  # another sequence's block may hold anything
        kv.clear(blocks, kv_set)
    rows = RowTable(4, num_blocks, built.vocab_size, torch.device("cpu"), NoGrammars(), num_sets=num_sets)
    row = Row(2)
    changes = [BlockTableChange(row, 0, blocks, kv_set) for kv_set in range(num_sets)]
    logits = []
    for start in range(0, len(token_ids), chunk):
        count = min(chunk, len(token_ids) - start)
        plan = StepPlan(
            [Span(row, start, count, False)],
            token_ids[start : start + count],
            new_rows=[] if start else [NewRow(row, SamplingParams(), token_ids, len(token_ids), 1)],
            block_table_changes=[] if start else changes,
        )
        rows.apply(plan)
        logits.append(built.model.logits(built.model(build_inputs(plan, rows, kv, grid_heads=grid_heads).batch)))
    return torch.cat(logits)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_logits_are_those_of_transformers(name: str, chunk: int, tmp_path: Path) -> None:
    reference = make_tiny(tmp_path, name)
    built = build_engine(tmp_path, EngineSettings(device="cpu", num_threads=1, kv=KvSettings(8, 64)))
    token_ids = torch.randint(0, built.vocab_size, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    assert (prompt_logits(built, token_ids, chunk) - expected).abs().max() < 1e-4


def test_logits_of_a_bfloat16_model_stay_near_float64(tmp_path: Path) -> None:
    reference = make_tiny(tmp_path, "qwen3").double()
    built = build_engine(tmp_path, EngineSettings(device="cpu", dtype="bfloat16", num_threads=1, kv=KvSettings(8, 64)))
    token_ids = list(range(100))
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    error = prompt_logits(built, token_ids, 33).double() - expected
    assert error.norm() / expected.norm() < 3e-2
