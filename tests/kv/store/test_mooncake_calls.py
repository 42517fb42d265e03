"""How the Mooncake tier calls its client: in how many calls, and on which threads. Needs no Mooncake."""

from __future__ import annotations

import os
import threading
import time
from itertools import chain

import pytest

from stoker.kv.blocks.transfer import TierUnavailable
from stoker.kv.store.tiers.mooncake.mooncake_call_lane import CallLane
from stoker.kv.store.tiers.mooncake.mooncake_tier import _batches


@pytest.mark.parametrize(
    ("count", "most", "sizes"), [(0, 8, []), (1, 8, [1]), (8, 8, [8]), (9, 8, [4, 5]), (127, 32, [31, 32, 32, 32])]
)
def test_batches_are_few_and_of_equal_size(count: int, most: int, sizes: list[int]) -> None:
    batches = list(_batches(range(count), most))
    assert [len(batch) for batch in batches] == sizes
    assert list(chain.from_iterable(batches)) == list(range(count))


def test_polling_calls_have_a_lower_priority() -> None:
    lane = CallLane("test", 1, 7)
    here = os.getpriority(os.PRIO_PROCESS, 0)
    there = lane.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(60)
    assert there == min(19, here + 7)
    assert os.getpriority(os.PRIO_PROCESS, 0) == here, "its threads alone"
    assert lane.stop(time.monotonic() + 60)


def test_a_lane_bounds_its_pending_calls() -> None:
    lane, until = CallLane("test", 1), threading.Event()
    for _ in range(4):
        lane.submit(lambda: until.wait(60))
    with pytest.raises(TierUnavailable, match="4 calls already wait in the test lane"):
        lane.submit(lambda: True)
    until.set()
    assert lane.stop(time.monotonic() + 60)
