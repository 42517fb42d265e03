"""An engine that cannot be built leaves nothing behind: no ranks, no KV server and no tiers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tiny import make_tiny

from stoker.base.config import EngineSettings, HandoffSettings, KvSettings, StoreSettings
from stoker.base.errors import ConfigError
from stoker.engine.build import build_engine
from stoker.engine.ranks.rank_host import NoRanks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder, "llama")
    return folder


class CountedRanks(NoRanks):
    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def test_ranks_are_closed_if_a_tier_cannot_be_built(folder: Path, tmp_path: Path) -> None:
    ranks, store = CountedRanks(), StoreSettings(disk_dir=str(tmp_path), disk_key_file=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="missing"):
        build_engine(folder, EngineSettings(device="cpu", kv=KvSettings(4, 64), store=store), ranks=ranks)
    assert ranks.num_closed == 1


def test_threads_end_if_the_measurement_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    before, ranks = set(threading.enumerate()), CountedRanks()
    monkeypatch.setattr("stoker.engine.build._measure_prefill", fail)
    settings = EngineSettings(
        device="cpu",
        kv=KvSettings(4, 64),
        handoff=HandoffSettings(serves=True, prefills=True, transports=("tcp",)),
        store=StoreSettings(host_gib=0.01),
    )
    with pytest.raises(RuntimeError, match="the device is lost"):
        build_engine(folder, settings, ranks=ranks)
    assert ranks.num_closed == 1
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
    assert [thread.name for thread in set(threading.enumerate()) - before] == []


def test_an_unknown_tier_is_refused_before_the_model_is_opened(tmp_path: Path) -> None:
    settings = EngineSettings(device="cpu", store=StoreSettings(tiers=("nowhere",)))
    with pytest.raises(ConfigError, match="--kv-tier: unknown tier 'nowhere'"):
        build_engine(tmp_path, settings)  # the folder is empty
