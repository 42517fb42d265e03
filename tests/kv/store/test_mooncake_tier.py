"""The Mooncake tier with a real master and real other workers, without failures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import string_at
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv.mooncake_worker import (
    FINGERPRINT,
    LAYOUT,
    PATIENCE_S,
    WorkerProcess,
    calls_take,
    chain,
    contents,
    finds,
    make_tier,
    read,
    reads,
    within,
    write,
    writes,
)
from tier_writes import put

from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.mooncake.master import INSTALL_HINT, MasterFailed, MooncakeMaster, is_installed
from stoker.kv.store.buffer_pool import HEADROOM_BYTES, new_buffer
from stoker.kv.store.tiers.mooncake.mooncake_object import ObjectFormat
from stoker.kv.store.tiers.mooncake.mooncake_tier import MooncakeTier
from stoker.kv.store.tiers.tier import TierContext

pytestmark = pytest.mark.skipif(not is_installed(), reason=f"Mooncake is not installed: {INSTALL_HINT}")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with MooncakeMaster(tmp_path_factory.mktemp("mooncake") / "master.log", lease_ms=200, client_ttl_s=10) as running:
        yield running


@pytest.fixture(scope="module")
def one_tier(master: MooncakeMaster) -> Iterator[MooncakeTier]:
    with calls_take(PATIENCE_S):
        tier = make_tier(master.address, 1 / 16)
        yield tier
        tier.close()


@pytest.fixture
def tier(one_tier: MooncakeTier) -> MooncakeTier:
    """An empty tier."""
    one_tier.drop([name.key for name in one_tier.names()])
    return one_tier


def test_a_worker_finds_and_reads_what_another_wrote(master: MooncakeMaster, tier: MooncakeTier) -> None:
    names = chain(150)
    keys = [name.key for name in names]
    with WorkerProcess(master.address, 1 / 16) as other:
        assert not any(tier.find(keys))
        assert other.has_all("write", 150)
        assert finds(tier, names)
        assert reads(tier, names)
        assert set(tier.names()) == set(names), "the objects themselves say what they are"
        assert writes(tier, chain(20, seed=1))
        assert other.has_all("read", 20, seed=1)
        assert other.end() == 0
    assert within(PATIENCE_S, lambda: not any(tier.find(keys))), "its segment went with it"
    assert list(tier.names()) == chain(20, seed=1), "and we no longer tell of what it had"


def test_names_are_complete_with_parents_first(tier: MooncakeTier) -> None:
    names = chain(30)
    salted = BlockName(BlockKey(b"s" * 16), BlockKey(b"r" * 16), tuple(range(16)), "5a17" * 8)
    assert writes(tier, [salted, *reversed(names)])
    listed = list(tier.names())
    assert set(listed) == {salted, *names}
    assert [name for name in listed if name is not salted and name != salted] == names


def test_a_block_in_the_store_is_not_sent_again(tier: MooncakeTier) -> None:
    [name] = chain(1)
    assert write(tier, [name]) == [True]
    other_bytes = np.zeros(LAYOUT.block_bytes, dtype=np.uint8)
    assert put(tier, [name], [other_bytes]) == [True]
    assert read(tier, [name]) == [True]


def test_a_block_that_was_just_read_can_be_dropped(tier: MooncakeTier) -> None:
    names = chain(4)
    assert writes(tier, names)
    assert reads(tier, names)
    tier.drop([name.key for name in names[2:]])
    assert tier.find([name.key for name in names]) == [True, True, False, False]
    assert read(tier, names) == [True, True, False, False]


def test_several_threads_with_more_blocks_than_one_call_takes(tier: MooncakeTier) -> None:
    chains = [chain(300, seed=10 + i) for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda names: writes(tier, names), chains))
        assert all(threads.map(lambda names: reads(tier, names), chains))


def test_a_header_describes_its_block_and_fits_no_other() -> None:
    ours = ObjectFormat("tiny", LAYOUT)
    [name] = chain(1)
    packed = ours.pack(name, 77)
    assert packed is not None
    header = ours.unpack(packed, name.key)
    assert header is not None
    assert (header.name, header.checksum) == (name, 77)
    assert ours.unpack(packed, BlockKey(b"x" * 16)) is None
    assert ObjectFormat("other", LAYOUT).unpack(packed, name.key) is None
    for i in range(len(packed)):
        bent = bytearray(packed)
        bent[i] ^= 1
        assert ours.unpack(bytes(bent), name.key) is None, f"byte {i}"
    assert ours.unpack(packed[:50], name.key) is None
    assert ours.pack(BlockName(name.key, name.parent, (1,) * 1000), 0) is None


@pytest.mark.slow
def test_blocks_outlive_master_and_workers_on_an_ssd(tmp_path: Path) -> None:
    names, folder = chain(96), tmp_path / "ssd"
    with MooncakeMaster(tmp_path / "master.log", lease_ms=200, client_ttl_s=3, ssd=True) as master:
        first = make_tier(master.address, 1 / 16, ssd_dir=folder)
        assert writes(first, names)

        def all_written() -> bool:
            files = [file for file in folder.rglob("*") if file.is_file()]
            return sum(file.stat().st_size for file in files) > len(names) * LAYOUT.block_bytes

        assert within(15, all_written)
        first.close()
        master.kill()
        master.start()
        second = make_tier(master.address, 1 / 16, ssd_dir=folder)
        # The last file was not full, and may be missing.
        assert within(15, lambda: second.find([name.key for name in names]).count(True) > 80)
        assert read(second, names).count(True) > 80
        second.close()


def test_two_masters_do_not_share_a_port(tmp_path: Path, master: MooncakeMaster) -> None:
    host, _, port = master.address.rpartition(":")
    doomed = MooncakeMaster(tmp_path / "log", host=host, port=int(port))
    with pytest.raises(MasterFailed, match="another process already listens"):
        doomed.start()
    assert master.is_healthy()


def test_headers_in_the_headroom_make_the_same_objects(master: MooncakeMaster, tier: MooncakeTier) -> None:
    """One worker has buffers with headroom, the other has none. Nothing beyond the headroom is written."""
    settings = StoreSettings(mooncake_master=master.address, mooncake_segment_gib=1 / 16)
    roomy = MooncakeTier(settings, TierContext(FINGERPRINT, LAYOUT, lambda keys: None, headroom_bytes=HEADROOM_BYTES))
    theirs, ours = chain(40), chain(40, seed=1)
    buffers = [new_buffer(LAYOUT.block_bytes) for _ in theirs]
    assert writes(tier, theirs)
    assert within(PATIENCE_S, lambda: roomy.read([name.key for name in theirs], buffers) == [True] * 40)
    for name, buffer in zip(theirs, buffers, strict=True):
        assert np.array_equal(buffer, contents(name))
        assert not string_at(buffer.ctypes.data - HEADROOM_BYTES, HEADROOM_BYTES - 1024).strip(b"\0")
    for name, buffer in zip(ours, buffers, strict=True):
        buffer[:] = contents(name)
    assert within(PATIENCE_S, lambda: put(roomy, ours, buffers) == [True] * 40)
    assert reads(tier, ours)
    assert set(roomy.names()) == {*theirs, *ours}
    roomy.close()


def test_a_block_removed_during_its_read_is_a_miss(tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may hold another block when its bytes are read. It is not corrupt, and is not counted as such."""
    names, others = chain(3), chain(3, seed=1)
    assert writes(tier, names + others)
    real: Any = tier._store_client._client
    asked: list[int] = []

    class Late:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def batch_get_into_multi_buffers(self, keys: list[str], *places: object) -> list[int]:
            asked.append(len(keys))
            if len(asked) == 1:
                real.batch_remove(keys[:1], True)
                keys = [keys[0].replace(names[0].key.hex(), others[0].key.hex()), *keys[1:]]
            codes: list[int] = real.batch_get_into_multi_buffers(keys, *places)
            return codes

    num_corrupt = tier.stats().corrupt
    monkeypatch.setattr(tier._store_client, "_client", Late())
    assert read(tier, names) == [False, True, True]
    assert asked == [3, 1]
    assert tier.stats().corrupt == num_corrupt
    assert reads(tier, others)
