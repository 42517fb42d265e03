"""Blocks that Mooncake lists but that cannot be read: which owners are suspected to be dead, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kv.peer_world import LAYOUT, key

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import TierUnavailable
from stoker.kv.store.tiers.mooncake import mooncake_suspect_blocks as mooncake_doubts
from stoker.kv.store.tiers.mooncake.mooncake_client import MooncakeClient
from stoker.kv.store.tiers.mooncake.mooncake_object import ObjectFormat
from stoker.kv.store.tiers.mooncake.mooncake_suspect_blocks import SuspectBlocks

FORMAT = ObjectFormat("f", LAYOUT)


class Master:
    """A client of a master that knows the owner of each block."""

    def __init__(self) -> None:
        self.owners: dict[BlockKey, str] = {}
        self.answers = True

    def submit(self, lane: str, work: Callable[[Any], Any]) -> Any:
        if not self.answers:
            raise TierUnavailable("no master")
        return work(self)

    def wait(self, answer: Any, deadline_s: float) -> Any:
        return answer

    def batch_get_replica_desc(self, store_keys: list[str]) -> dict[str, list[Any]]:
        by_store_key = {FORMAT.store_key(key): owner for key, owner in self.owners.items()}
        return {one: [_replica(by_store_key[one])] for one in store_keys if one in by_store_key}

    def suspects(self, suspects: SuspectBlocks, *keys: BlockKey) -> frozenset[BlockKey]:
        return suspects.find(cast(MooncakeClient, self), keys)


def _replica(owner: str) -> Any:
    place = SimpleNamespace(buffer_descriptor=SimpleNamespace(transport_endpoint=owner))
    return SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: place)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(mooncake_doubts, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_all_blocks_of_the_owner_of_an_unreadable_block_are_suspect_for_a_while(clock: SimpleNamespace) -> None:
    master, suspects = Master(), SuspectBlocks(FORMAT)
    master.owners = {key(1): "dead", key(2): "dead", key(3): "live"}
    suspects.add([key(1)])
    assert master.suspects(suspects, key(2), key(3)) == {key(1), key(2)}
    clock.now_s += 13
    assert master.suspects(suspects, key(1), key(2), key(3)) == frozenset()


def test_a_later_owner_of_an_unreadable_block_is_not_suspected(clock: SimpleNamespace) -> None:
    """The master died with the owner, so the owner could not be looked up. Other workers have written the block again
    since."""
    master, suspects = Master(), SuspectBlocks(FORMAT)
    suspects.add([key(1)])
    master.answers = False
    with pytest.raises(TierUnavailable):
        master.suspects(suspects, key(1))
    clock.now_s += 60
    master.answers = True
    master.owners = {key(1): "live", key(2): "dead", key(3): "live"}
    suspects.add([key(2)])
    assert master.suspects(suspects, key(1), key(3)) == {key(2)}
