"""What every registered tier must hold: bytes come back as they went or not at all; full means the oldest go; threads, other
processes and their deaths change nothing of that."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from kv.forked import FORKED
from kv.mooncake_worker import PATIENCE_S, calls_take
from tier_writes import put

from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName, TierUnavailable
from stoker.kv.store.tiers.host.host_memory import remove_host_store
from stoker.kv.store.tiers.host.host_tier import HostTier
from stoker.kv.store.tiers.tier import TIERS, HostBytes, Tier, TierContext, build_tier

LAYOUT = KvLayout(num_layers=2, num_heads=2, head_dim=64, block_tokens=64, dtype="float32", dtype_bytes=4)
BLOCK = LAYOUT.block_bytes
CAPACITY = 16  # blocks
FINGERPRINT = "conformance"
ROOT = BlockKey(bytes(16))


def key_of(number: int) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(16))


def name_of(number: int) -> BlockName:
    """Blocks are one chain, ten to a sequence."""
    is_first = number % 10 == 0
    return BlockName(
        key=key_of(number),
        parent=ROOT if is_first else key_of(number - 1),
        token_ids=tuple(range(number, number + LAYOUT.block_tokens)),
        salt="" if is_first else None,
    )


def bytes_of(key: BlockKey) -> HostBytes:
    """A function of the key alone, so that any process can tell right from wrong."""
    return np.frombuffer(random.Random(key).randbytes(BLOCK), dtype=np.uint8)


def write(tier: Tier, *numbers: int) -> list[bool]:
    return put(tier, [name_of(number) for number in numbers], [bytes_of(key_of(number)) for number in numbers])


def read(tier: Tier, *numbers: int) -> list[bool]:
    """Which were had; what was had is compared."""
    keys = [key_of(number) for number in numbers]
    into = [np.full(BLOCK, 0xEE, dtype=np.uint8) for _ in keys]
    had = tier.read(keys, into)
    for key, data, is_had in zip(keys, into, had, strict=True):
        assert not is_had or np.array_equal(data, bytes_of(key)), f"wrong bytes of {key.hex()}"
    return had


def find(tier: Tier, *numbers: int) -> list[bool]:
    return tier.find([key_of(number) for number in numbers])


@dataclass
class World:
    """One tier with its medium. `corrupt` changes a block's bytes where they lie."""

    tier_name: str
    settings: StoreSettings
    is_exact: bool = True  # holds CAPACITY blocks, and then evicts the least recently used one
    outlives_writers: bool = True
    corrupt: Callable[[Tier, BlockKey], None] | None = None
    hurry: Callable[[], object] = lambda: None  # from now on calls are given up as early as they would be in use
    lost: list[BlockKey] = field(default_factory=list)
    made: list[Tier] = field(default_factory=list)

    def make(self, num_blocks: int = CAPACITY) -> Tier:
        tier = make_tier(self.tier_name, sized(self.settings, num_blocks), self.lost)
        self.made.append(tier)
        return tier


def sized(settings: StoreSettings, num_blocks: int) -> StoreSettings:
    gib = num_blocks * BLOCK / 2**30
    on_disk = num_blocks * (BLOCK + (8192 if settings.disk_key_file else 4096)) / 2**30
    return replace(settings, host_gib=gib if settings.host_gib else 0.0, disk_gib=on_disk)


def make_tier(tier_name: str, settings: StoreSettings, lost: list[BlockKey]) -> Tier:
    tier = build_tier(tier_name, settings, TierContext(FINGERPRINT, LAYOUT, lost.extend))
    assert tier is not None
    return tier


def flip_in_memory(tier: Tier, key: BlockKey) -> None:
    assert isinstance(tier, HostTier)
    table = tier._open()
    slot = int(table.lookup(np.frombuffer(key, dtype="<u8").reshape(1, 2))[0])
    table.block(slot)[BLOCK // 2] ^= 1


def flip_on_disk(root: Path) -> Callable[[Tier, BlockKey], None]:
    def flip(tier: Tier, key: BlockKey) -> None:
        (path,) = root.rglob(f"{key.hex()}.kv")
        data = bytearray(path.read_bytes())
        data[4096 + BLOCK // 2] ^= 1
        path.write_bytes(data)

    return flip


def host_private(tmp_path: Path) -> Iterator[World]:
    yield World("host", StoreSettings(host_gib=1.0), corrupt=flip_in_memory)


def host_shared(tmp_path: Path) -> Iterator[World]:
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield World("host", StoreSettings(name=name, host_gib=1.0), corrupt=flip_in_memory)
    remove_host_store(name)


def disk(tmp_path: Path) -> Iterator[World]:
    yield World("disk", StoreSettings(disk_dir=str(tmp_path / "kv")), corrupt=flip_on_disk(tmp_path))


def disk_encrypted(tmp_path: Path) -> Iterator[World]:
    key_file = tmp_path / "key"
    key_file.touch(0o600)
    key_file.write_bytes(bytes(range(32)))
    settings = StoreSettings(disk_dir=str(tmp_path / "kv"), disk_key_file=str(key_file))
    yield World("disk", settings, corrupt=flip_on_disk(tmp_path))


def mooncake(tmp_path: Path) -> Iterator[World]:
    if "mooncake" not in TIERS:
        pytest.skip("there is no mooncake tier")
    from stoker.kv.mooncake.master import MooncakeMaster, is_installed

    if not is_installed():
        pytest.skip("mooncake's client is not installed, or a library that it needs")
    with ExitStack() as patience, MooncakeMaster(tmp_path / "master.log", lease_ms=200, client_ttl_s=4) as master:
        patience.enter_context(calls_take(PATIENCE_S))
        settings = StoreSettings(mooncake_master=master.address, mooncake_segment_gib=0.125)
        yield World("mooncake", settings, is_exact=False, outlives_writers=False, hurry=patience.close)


WORLDS = {make.__name__: make for make in (host_private, host_shared, disk, disk_encrypted, mooncake)}


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name in ("host.host_tier.LOCK_S", "disk.disk_eviction._LOCK_S", "disk.disk_tier._ANSWER_S"):
        monkeypatch.setattr(f"stoker.kv.store.tiers.{name}", PATIENCE_S)
    makes = WORLDS[request.param](tmp_path)
    world = next(makes)
    yield world
    for tier in world.made:
        tier.close()
    assert next(makes, None) is None


def test_every_registered_tier_has_a_world() -> None:
    assert {"disk" if name.startswith("disk") else name.partition("_")[0] for name in WORLDS} >= set(TIERS)


def test_no_tier_is_made_that_was_not_asked_for() -> None:
    for name in TIERS:
        assert build_tier(name, StoreSettings(), TierContext(FINGERPRINT, LAYOUT, lambda keys: None)) is None


def test_bytes_come_back_as_they_went(world: World) -> None:
    tier = world.make()
    assert find(tier, 0, 1, 2) == [False, False, False]
    assert read(tier, 0) == [False]
    assert write(tier, 0, 1, 2) == [True, True, True]
    assert find(tier, 0, 1, 2) == [True, True, True]
    assert read(tier, 0, 1, 2) == [True, True, True]
    assert tier.stats().blocks == 3
    assert world.lost == []


def test_nothing_asked_is_nothing_done(world: World) -> None:
    tier = world.make()
    assert (tier.find([]), tier.read([], []), put(tier, [], [])) == ([], [], [])
    tier.drop([])


def test_partial_hits(world: World) -> None:
    tier = world.make()
    write(tier, 1, 3)
    assert find(tier, 0, 1, 2, 3) == [False, True, False, True]
    assert read(tier, 0, 1, 2, 3) == [False, True, False, True]


def test_the_same_block_twice_is_one(world: World) -> None:
    tier = world.make()
    assert write(tier, 0, 1, 0) == [True, True, True]
    assert write(tier, 0) == [True]
    assert tier.stats().blocks == 2


def test_a_block_asked_for_twice_is_had_twice(world: World) -> None:
    tier = world.make()
    write(tier, 0)
    assert read(tier, 0, 1, 0) == [True, False, True]
    assert tier.stats().corrupt == 0


def test_a_dropped_block_is_gone_and_can_come_back(world: World) -> None:
    tier = world.make()
    write(tier, 0, 1)
    tier.drop([key_of(0), key_of(5)])
    assert find(tier, 0, 1) == [False, True]
    assert read(tier, 0, 1) == [False, True]
    assert write(tier, 0) == [True]
    assert read(tier, 0) == [True]


def test_it_says_what_it_holds_parents_first(world: World) -> None:
    tier = world.make()
    write(tier, 2, 1, 12, 0, 10, 11)
    names = list(tier.names())
    assert sorted(names, key=lambda name: name.token_ids) == [name_of(number) for number in (0, 1, 2, 10, 11, 12)]
    said: set[BlockKey] = set()
    for name in names:
        assert name.salt is not None or name.parent in said
        said.add(name.key)


def test_full_means_that_the_oldest_go(world: World) -> None:
    if not world.is_exact:
        pytest.skip("it evicts by a rule of its own")
    tier = world.make()
    for number in range(CAPACITY):
        assert write(tier, number) == [True]
    assert world.lost == []
    read(tier, 0)  # used last, if written first
    for number in range(100, 104):
        assert write(tier, number) == [True]
    assert world.lost == [key_of(number) for number in (1, 2, 3, 4)]
    assert find(tier, 0, 1, 2, 3, 4, 5) == [True, False, False, False, False, True]
    stats = tier.stats()
    assert (stats.blocks, stats.evicted) == (CAPACITY, 4)
    assert stats.used_bytes <= stats.capacity_bytes


def test_of_a_chain_that_does_not_fit_the_beginning_is_kept(world: World) -> None:
    if not world.is_exact:
        pytest.skip("it evicts by a rule of its own")
    tier = world.make()
    assert write(tier, *range(CAPACITY + 5)) == [True] * CAPACITY + [False] * 5
    assert read(tier, *range(CAPACITY)) == [True] * CAPACITY
    write(tier, 100)
    assert world.lost == [key_of(CAPACITY - 1)]


def test_many_at_once(world: World) -> None:
    tier = world.make(300)
    numbers = range(200)
    assert write(tier, *numbers) == [True] * 200
    assert find(tier, *numbers, *range(1000, 1800)) == [True] * 200 + [False] * 800
    assert read(tier, *reversed(numbers)) == [True] * 200


def test_a_closed_tier_is_unavailable(world: World) -> None:
    tier = world.make()
    write(tier, 0)
    tier.close()
    tier.close()
    with pytest.raises(TierUnavailable):
        read(tier, 0)


def test_wrong_bytes_are_dropped_counted_and_not_served(world: World) -> None:
    if world.corrupt is None:
        pytest.skip("its medium cannot be touched from here")
    tier = world.make()
    write(tier, 0, 1, 2)
    world.corrupt(tier, key_of(1))
    assert read(tier, 0, 1, 2) == [True, False, True]
    assert find(tier, 0, 1, 2) == [True, False, True]
    assert world.lost == [key_of(1)]
    assert tier.stats().corrupt == 1
    assert write(tier, 1) == [True]
    assert read(tier, 0, 1, 2) == [True, True, True]


def hammer(
    tier: Tier, seed: int, until_s: float, failures: list[BaseException], may_be_unavailable: bool = False
) -> None:
    """Random reads, writes and drops of more blocks than there is room for."""
    rng = random.Random(seed)
    try:
        while time.monotonic() < until_s:
            with suppress(*[TierUnavailable] * may_be_unavailable):
                hit(tier, rng)
    except BaseException as failed:
        failures.append(failed)


def hit(tier: Tier, rng: random.Random) -> None:
    numbers = rng.sample(range(2 * CAPACITY), rng.randint(1, 6))
    action = rng.random()
    if action < 0.45:
        read(tier, *numbers)
    elif action < 0.9:
        write(tier, *numbers)
    elif action < 0.95:
        tier.drop([key_of(number) for number in numbers])
    else:
        find(tier, *numbers)
        assert all(name == name_of(name.token_ids[0]) for name in tier.names())


def test_threads_never_see_wrong_bytes(world: World) -> None:
    tier = world.make()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    failures: list[BaseException] = []
    until_s = time.monotonic() + 2.0
    threads = [threading.Thread(target=hammer, args=(tier, seed + at, until_s, failures)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stats = tier.stats()
    assert (stats.corrupt, stats.errors) == (0, 0)
    if world.is_exact:
        assert stats.used_bytes <= stats.capacity_bytes


def other_process(tier_name: str, settings: StoreSettings, seed: int, hammers_s: float, told: str) -> None:
    """Runs elsewhere: reads what it finds of the first ten blocks, says how many, and then hammers. Where others hammer already,
    that may be none."""
    tier = make_tier(tier_name, settings, [])
    until_s = time.monotonic() + (1 if hammers_s else PATIENCE_S)
    had = 0
    while had < 10 and time.monotonic() < until_s:
        with suppress(TierUnavailable):  # on a machine that stalls, for a moment
            had = sum(read(tier, *range(10)))
    while not all(write(tier, 99)) and time.monotonic() < until_s:
        pass
    Path(told).with_suffix(".tmp").write_text(str(had))
    Path(told).with_suffix(".tmp").rename(told)
    failures: list[BaseException] = []
    hammer(tier, seed, time.monotonic() + hammers_s, failures)
    tier.close()
    Path(told).write_text("".join(repr(failed) for failed in failures) or "fine")


def takes_away(tier_name: str, settings: StoreSettings, is_exact: bool) -> None:
    """Runs elsewhere. The first five blocks go: one by name and four to make room, where it is known who goes for that."""
    with calls_take(PATIENCE_S):
        tier = make_tier(tier_name, settings, [])
        list(tier.names())  # a start does not wait for all that is there, and room is made of what is known
        tier.drop([key_of(number) for number in ([0] if is_exact else range(5))])
        if is_exact:
            assert write(tier, *range(100, 105)) == [True] * 5
        tier.close()


def test_what_another_process_removed_is_told(world: World) -> None:
    """Without anybody asking for it here: what gateways believe of this worker must not grow old while it is idle."""
    tier = world.make()
    if tier.shared_location is None:
        pytest.skip("it is of one process alone")
    for number in range(CAPACITY):
        write(tier, number)
    args = (world.tier_name, sized(world.settings, CAPACITY), world.is_exact)
    process = FORKED.Process(target=takes_away, args=args)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    expected = sorted(key_of(number) for number in range(5))
    until_s = time.monotonic() + PATIENCE_S
    while sorted(world.lost) != expected:
        assert time.monotonic() < until_s, f"{len(world.lost)} of 5 were told"
        time.sleep(0.01)
        tier.catch_up()
    write(tier, 0)
    tier.catch_up()
    assert key_of(0) not in world.lost[5:], "it is here again"


def told_by(path: Path) -> str:
    until_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until_s, f"{path} was not written"
        time.sleep(0.01)
    return path.read_text()


def test_another_process_has_the_same_blocks(world: World, tmp_path: Path) -> None:
    tier = world.make()
    if tier.shared_location is None:
        pytest.skip("it is of one process alone")
    write(tier, *range(10))
    told = tmp_path / "told"
    args = (world.tier_name, sized(world.settings, CAPACITY), 0, 0.0, str(told))
    process = FORKED.Process(target=other_process, args=args)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert told_by(told) == "fine"
    assert read(tier, 99) == [world.outlives_writers]


def test_processes_killed_in_the_middle_leave_a_tier_that_works(world: World, tmp_path: Path) -> None:
    world.hurry()
    tier = world.make()
    if tier.shared_location is None:
        pytest.skip("it is of one process alone")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    write(tier, *range(10))
    failures: list[BaseException] = []
    told = [tmp_path / f"told-{at}" for at in range(3)]
    processes = [
        FORKED.Process(
            target=other_process, args=(world.tier_name, sized(world.settings, CAPACITY), seed + at, 30.0, str(path))
        )
        for at, path in enumerate(told)
    ]
    for process in processes:
        process.start()
    for path in told:
        told_by(path)
    for process in processes:
        hammer(tier, seed + 10, time.monotonic() + rng.uniform(0.1, 0.4), failures, not world.outlives_writers)
        process.kill()
        hammer(tier, seed + 20, time.monotonic() + 0.2, failures, not world.outlives_writers)
        process.join()
        assert failures == []

    def works() -> bool:
        with suppress(TierUnavailable):
            return all(write(tier, *range(10))) and all(read(tier, *range(10)))
        return False

    # Where blocks lie with their writers, those of the dead are listed for a while yet, and cost time to try.
    until_s = time.monotonic() + (0.0 if world.outlives_writers else PATIENCE_S)
    while not (is_working := works()) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert is_working
    for number in range(CAPACITY):  # what the dead had begun is not lost for good
        write(tier, 1000 + number)
    assert tier.stats().corrupt == 0
    if world.is_exact:
        assert read(tier, *range(1000, 1000 + CAPACITY)) == [True] * CAPACITY
