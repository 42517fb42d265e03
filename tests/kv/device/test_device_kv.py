"""The memory of the blocks exists as long as it is used, and no longer."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path

import torch
from tiny import make_tiny

from stoker.base.config import EngineSettings, KvSettings
from stoker.engine.llm import LLM
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.device.device_kv import DeviceKv
from stoker.sched.request import SamplingParams


def files() -> set[int]:
    """The inodes of open files that are the memory of blocks."""
    gc.collect()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:stoker-kv"):
                found.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
    return found


def test_memory_is_freed_with_the_blocks_and_not_before() -> None:
    before = files()  # files that earlier tests left may disappear at any moment
    kv = DeviceKv(KvLayout.of(2, 2, 16, 16, "float32", 4), 4, torch.device("cpu"))
    blocks = kv.sets[0].host_blocks()
    assert blocks is not None
    ours = files() - before
    assert len(ours) == 1
    del kv
    blocks[:] = 1  # a view keeps the memory alive
    del blocks
    assert not ours & files()


def test_engines_built_one_after_another_leave_no_memory_behind(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", torch.float32)
    before = files()  # files that earlier tests left may disappear at any moment
    for _ in range(2):
        llm = LLM(tmp_path, EngineSettings(device="cpu", num_threads=1, kv=KvSettings(8, 16)))
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0), 4)
        assert len(files() - before) == 1
        llm.close()
        del llm
    assert not files() - before
