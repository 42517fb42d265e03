"""The tests that every registered tier must pass.

Bytes are read back as they were written, or not at all. A full tier evicts the oldest blocks. Threads, other processes and
their deaths do not change that. tier_world.py says how a tier gets its test environment.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from kv.forked import FORKED
from kv.mooncake_worker import PATIENCE_S, calls_take
from tier_world import BLOCK, CAPACITY, FINGERPRINT, LAYOUT, WORLD_FILES, TierWorld, make_tier, worlds
from tier_writes import put

from stoker.base.config import StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName, TierUnavailable
from stoker.kv.store.tiers.tier import TIERS, HostBytes, Tier, TierContext, build_tier, check_tier_names, tier_names
from stoker.kv.store.tiers.tier_options import parse_tier_options

ROOT = BlockKey(bytes(16))


def key_of(number: int) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(16))


def name_of(number: int) -> BlockName:
    """Return the name of a block. Every ten blocks are one chain."""
    is_first = number % 10 == 0
    return BlockName(
        key=key_of(number),
        parent=ROOT if is_first else key_of(number - 1),
        token_ids=tuple(range(number, number + LAYOUT.block_tokens)),
        salt="" if is_first else None,
    )


def bytes_of(key: BlockKey) -> HostBytes:
    """Return a block's bytes, which depend on the key alone, so that any process can check them."""
    return np.frombuffer(random.Random(key).randbytes(BLOCK), dtype=np.uint8)


def write(tier: Tier, *numbers: int) -> list[bool]:
    return put(tier, [name_of(number) for number in numbers], [bytes_of(key_of(number)) for number in numbers])


def read(tier: Tier, *numbers: int) -> list[bool]:
    """Read blocks, check the bytes of those that were read, and return which were."""
    keys = [key_of(number) for number in numbers]
    into = [np.full(BLOCK, 0xEE, dtype=np.uint8) for _ in keys]
    had = tier.read(keys, into)
    for key, data, is_had in zip(keys, into, had, strict=True):
        assert not is_had or np.array_equal(data, bytes_of(key)), f"wrong bytes of {key.hex()}"
    return had


def find(tier: Tier, *numbers: int) -> list[bool]:
    return tier.find([key_of(number) for number in numbers])


WORLDS = worlds()


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierWorld]:
    makes = WORLDS[request.param](tmp_path)
    world = next(makes)
    yield world
    for tier in world.made:
        tier.close()
    assert next(makes, None) is None


def test_every_world_file_belongs_to_a_registered_tier() -> None:
    assert {path.stem for path in WORLD_FILES.glob("*.py")} <= set(TIERS)


def test_default_settings_build_no_tier() -> None:
    for name in TIERS:
        assert build_tier(name, StoreSettings(), TierContext(FINGERPRINT, LAYOUT, lambda keys: None)) is None


def test_tiers_are_searched_from_the_nearest_to_the_farthest() -> None:
    assert [name for name in tier_names() if name in ("host", "disk", "mooncake")] == ["host", "disk", "mooncake"]


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (("nowhere",), "unknown tier 'nowhere'"),
        (("disk,dir",), "'dir' is not KEY=VALUE"),
        (("disk", "disk"), "names 'disk' twice"),
        (("disk",), "'disk': this tier has settings of its own"),
    ],
)
def test_a_tier_that_cannot_be_turned_on_by_name_is_refused(tiers: tuple[str, ...], message: str) -> None:
    settings = StoreSettings(tiers=tiers)

    def build() -> None:
        check_tier_names(settings)
        build_tier("disk", settings, TierContext(FINGERPRINT, LAYOUT, lambda keys: None))

    with pytest.raises(ConfigError, match=message):
        build()


def test_an_unknown_or_wrong_option_is_refused_by_name() -> None:
    options = parse_tier_options(["fast,gib=2,bogus=1"])["fast"]
    assert (options.number("gib", 1.0), options.text("dir", "/tmp")) == (2.0, "/tmp")
    with pytest.raises(ConfigError, match="'fast' has no option 'bogus'; its options are: dir, gib"):
        options.check_all_used()
    with pytest.raises(ConfigError, match="gib='two' is not a number"):
        parse_tier_options(["fast,gib=two"])["fast"].number("gib", 1.0)


def test_bytes_are_read_as_they_were_written(world: TierWorld) -> None:
    tier = world.make()
    assert find(tier, 0, 1, 2) == [False, False, False]
    assert read(tier, 0) == [False]
    assert write(tier, 0, 1, 2) == [True, True, True]
    assert find(tier, 0, 1, 2) == [True, True, True]
    assert read(tier, 0, 1, 2) == [True, True, True]
    assert tier.stats().blocks == 3
    assert world.lost == []


def test_empty_calls_do_nothing(world: TierWorld) -> None:
    tier = world.make()
    assert (tier.find([]), tier.read([], []), put(tier, [], [])) == ([], [], [])
    tier.drop([])


def test_partial_hits(world: TierWorld) -> None:
    tier = world.make()
    write(tier, 1, 3)
    assert find(tier, 0, 1, 2, 3) == [False, True, False, True]
    assert read(tier, 0, 1, 2, 3) == [False, True, False, True]


def test_a_block_written_twice_is_stored_once(world: TierWorld) -> None:
    tier = world.make()
    assert write(tier, 0, 1, 0) == [True, True, True]
    assert write(tier, 0) == [True]
    assert tier.stats().blocks == 2


def test_a_block_can_be_read_twice_in_one_call(world: TierWorld) -> None:
    tier = world.make()
    write(tier, 0)
    assert read(tier, 0, 1, 0) == [True, False, True]
    assert tier.stats().corrupt == 0


def test_a_dropped_block_is_gone_and_can_be_written_again(world: TierWorld) -> None:
    tier = world.make()
    write(tier, 0, 1)
    tier.drop([key_of(0), key_of(5)])
    assert find(tier, 0, 1) == [False, True]
    assert read(tier, 0, 1) == [False, True]
    assert write(tier, 0) == [True]
    assert read(tier, 0) == [True]


def test_names_lists_all_blocks_with_parents_first(world: TierWorld) -> None:
    tier = world.make()
    write(tier, 2, 1, 12, 0, 10, 11)
    names = list(tier.names())
    assert sorted(names, key=lambda name: name.token_ids) == [name_of(number) for number in (0, 1, 2, 10, 11, 12)]
    said: set[BlockKey] = set()
    for name in names:
        assert name.salt is not None or name.parent in said
        said.add(name.key)


def test_a_full_tier_evicts_the_least_recently_used_blocks(world: TierWorld) -> None:
    if not world.is_exact:
        pytest.skip("it does not evict in the exact order of use")
    tier = world.make()
    for number in range(CAPACITY):
        assert write(tier, number) == [True]
    assert world.lost == []
    read(tier, 0)  # written first, but used last
    for number in range(100, 104):
        assert write(tier, number) == [True]
    assert world.lost == [key_of(number) for number in (1, 2, 3, 4)]
    assert find(tier, 0, 1, 2, 3, 4, 5) == [True, False, False, False, False, True]
    stats = tier.stats()
    assert (stats.blocks, stats.evicted) == (CAPACITY, 4)
    assert stats.used_bytes <= stats.capacity_bytes


def test_the_beginning_of_a_chain_that_does_not_fit_is_kept(world: TierWorld) -> None:
    if not world.is_exact:
        pytest.skip("it does not evict in the exact order of use")
    tier = world.make()
    assert write(tier, *range(CAPACITY + 5)) == [True] * CAPACITY + [False] * 5
    assert read(tier, *range(CAPACITY)) == [True] * CAPACITY
    write(tier, 100)
    assert world.lost == [key_of(CAPACITY - 1)]


def test_many_blocks_in_one_call(world: TierWorld) -> None:
    tier = world.make(300)
    numbers = range(200)
    assert write(tier, *numbers) == [True] * 200
    assert find(tier, *numbers, *range(1000, 1800)) == [True] * 200 + [False] * 800
    assert read(tier, *reversed(numbers)) == [True] * 200


def test_a_closed_tier_is_unavailable(world: TierWorld) -> None:
    tier = world.make()
    write(tier, 0)
    tier.close()
    tier.close()
    with pytest.raises(TierUnavailable):
        read(tier, 0)


def test_wrong_bytes_are_dropped_counted_and_not_served(world: TierWorld) -> None:
    if world.corrupt is None:
        pytest.skip("the test cannot change its stored bytes")
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
    """Read, write and drop random blocks, more than fit into the tier."""
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


def test_threads_never_see_wrong_bytes(world: TierWorld) -> None:
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


def other_process(tier_name: str, settings: StoreSettings, seed: int, hammers_s: float, report: str) -> None:
    """Runs in another process: read the first ten blocks, report how many were there, then hammer. If other processes
    hammer already, there may be none."""
    tier = make_tier(tier_name, settings, [])
    until_s = time.monotonic() + (1 if hammers_s else PATIENCE_S)
    had = 0
    while had < 10 and time.monotonic() < until_s:
        with suppress(TierUnavailable):  # a stalled machine may exceed a timeout
            had = sum(read(tier, *range(10)))
    while not all(write(tier, 99)) and time.monotonic() < until_s:
        pass
    Path(report).with_suffix(".tmp").write_text(str(had))
    Path(report).with_suffix(".tmp").rename(report)
    failures: list[BaseException] = []
    hammer(tier, seed, time.monotonic() + hammers_s, failures)
    tier.close()
    Path(report).write_text("".join(repr(failed) for failed in failures) or "fine")


def remove_blocks(tier_name: str, settings: StoreSettings, is_exact: bool) -> None:
    """Runs in another process: remove the first five blocks, one by its key and four by eviction if the eviction order
    is known."""
    with calls_take(PATIENCE_S):
        tier = make_tier(tier_name, settings, [])
        list(tier.names())  # waits for the scan of the disk: only known blocks can be evicted
        tier.drop([key_of(number) for number in ([0] if is_exact else range(5))])
        if is_exact:
            assert write(tier, *range(100, 105)) == [True] * 5
        tier.close()


def test_blocks_removed_by_another_process_are_reported(world: TierWorld) -> None:
    """The report needs no call for these blocks: what gateways know of an idle worker must stay current."""
    tier = world.make()
    if tier.shared_location is None:
        pytest.skip("the tier is private to one process")
    for number in range(CAPACITY):
        write(tier, number)
    args = (world.tier_name, world.settings(CAPACITY), world.is_exact)
    process = FORKED.Process(target=remove_blocks, args=args)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    expected = sorted(key_of(number) for number in range(5))
    until_s = time.monotonic() + PATIENCE_S
    while sorted(world.lost) != expected:
        assert time.monotonic() < until_s, f"{len(world.lost)} of 5 were reported"
        time.sleep(0.01)
        tier.catch_up()
    write(tier, 0)
    tier.catch_up()
    assert key_of(0) not in world.lost[5:], "it is here again"


def report_of(path: Path) -> str:
    until_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until_s, f"{path} was not written"
        time.sleep(0.01)
    return path.read_text()


def test_another_process_reads_the_same_blocks(world: TierWorld, tmp_path: Path) -> None:
    tier = world.make()
    if tier.shared_location is None:
        pytest.skip("the tier is private to one process")
    write(tier, *range(10))
    report = tmp_path / "report"
    args = (world.tier_name, world.settings(CAPACITY), 0, 0.0, str(report))
    process = FORKED.Process(target=other_process, args=args)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert report_of(report) == "fine"
    assert read(tier, 99) == [world.outlives_writers]


def test_a_tier_works_after_processes_were_killed_in_the_middle_of_calls(world: TierWorld, tmp_path: Path) -> None:
    world.hurry()
    tier = world.make()
    if tier.shared_location is None:
        pytest.skip("the tier is private to one process")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    write(tier, *range(10))
    failures: list[BaseException] = []
    report = [tmp_path / f"report-{at}" for at in range(3)]
    processes = [
        FORKED.Process(
            target=other_process, args=(world.tier_name, world.settings(CAPACITY), seed + at, 30.0, str(path))
        )
        for at, path in enumerate(report)
    ]
    for process in processes:
        process.start()
    for path in report:
        report_of(path)
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

    # If blocks are stored with their writers, those of dead writers are listed for a while, and reading them takes
    # time.
    until_s = time.monotonic() + (0.0 if world.outlives_writers else PATIENCE_S)
    while not (is_working := works()) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert is_working
    for number in range(CAPACITY):  # space that dead writers had reserved is not lost
        write(tier, 1000 + number)
    assert tier.stats().corrupt == 0
    if world.is_exact:
        assert read(tier, *range(1000, 1000 + CAPACITY)) == [True] * CAPACITY
