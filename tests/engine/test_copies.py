"""Blocks are copied a few at a time, because the temporary copies of hundreds of blocks would not fit into GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from stoker.base.config import EngineSettings, KvSettings
from stoker.base.ids import BlockId
from stoker.engine import runner as runners
from stoker.engine.grammar import NoGrammars
from stoker.engine.llm import LLM
from stoker.engine.rows import RowTable
from stoker.engine.runner import Runner
from stoker.engine.threads import FixedThreads
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.device.device_kv import DeviceKv
from stoker.sched.plan import BlockCopy, StepPlan
from stoker.sched.request import SamplingParams


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 100])
def test_copies_are_correct_however_many_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch, at_a_time: int) -> None:
    cpu, layout = torch.device("cpu"), KvLayout.of(1, 1, 2, 4, "float32", 4)
    monkeypatch.setattr(runners, "_COPY_BYTES", at_a_time * layout.block_bytes)
    kv = DeviceKv(layout, 8, cpu)
    kv.blocks.view(8, -1).copy_(torch.arange(8.0)[:, None].expand(8, kv.blocks[0].numel()))
    model = torch.nn.Identity()  # a plan without spans does not use it
    runner = Runner(model, 1, kv, RowTable(1, 1, 10, cpu, NoGrammars()), FixedThreads(1), 16)  # type: ignore[arg-type]
    # Blocks 0 and 2 are a source first and a destination later. Block 4 is copied onto itself.
    pairs = [(0, 1), (2, 0), (3, 2), (4, 4)]
    copies = [BlockCopy(BlockId(src), BlockId(dst)) for src, dst in pairs]
    runner.launch(StepPlan([], [], copies=copies)).wait()
    assert kv.blocks.view(8, -1)[:, 0].tolist() == [2, 0, 3, 3, 4, 5, 6, 7]


def test_many_repeated_prompts_copy_their_last_blocks_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path, "llama")
    settings = EngineSettings(device="cpu", num_threads=1, kv=KvSettings(block_tokens=4, num_blocks=400))
    copied: list[int] = []
    copy = DeviceKv.copy

    def recorded(kv: DeviceKv, src: Sequence[int], dst: Sequence[int], kv_set: int) -> None:
        copied.append(len(src) * kv.layout.block_bytes)
        copy(kv, src, dst, kv_set)

    monkeypatch.setattr(DeviceKv, "copy", recorded)
    with closing(LLM(tmp_path, settings)) as llm:
        max_bytes = 3 * llm.built.layout.block_bytes
        monkeypatch.setattr(runners, "_COPY_BYTES", max_bytes)
        prompts = [[number, 1, 2, 3, 4, 5] for number in range(20)]
        first, again = (llm.generate(prompts, SamplingParams(temperature=0.0), 8) for _ in range(2))
    assert [one.token_ids for one in again] == [one.token_ids for one in first]
    assert sum(copied) == 20 * max_bytes // 3
    assert max(copied) <= max_bytes
