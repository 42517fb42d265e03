"""KV events of several media: a gateway learns where each block is, also if it subscribes late."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from stoker.base.ids import BlockKey
from stoker.gateway.watch.rekey import Rekeyer
from stoker.kv.blocks.keys import next_key, root_key
from stoker.proto.events import BlockRemoved, BlockStored, KvEvent
from stoker.proto.messages import BlocksForgotten, BlocksNamed, KvEvents
from stoker.worker.kv_mirror import KvMirror

SIZE = 4


class Places:
    """The gateway's index of one worker."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {}

    def stored(self, keys: Sequence[int], medium: str) -> None:
        self.held.setdefault(medium, set()).update(keys)

    def removed(self, keys: Sequence[int], medium: str) -> None:
        self.held[medium] -= set(keys)

    def cleared(self) -> None:
        self.held.clear()

    @property
    def counts(self) -> dict[str, int]:
        return {medium: len(keys) for medium, keys in self.held.items() if keys}


class Gateway:
    def __init__(self) -> None:
        self.places = Places()
        self._rekeyer = Rekeyer(self.places, SIZE, hashes_salts=False)

    def read(self, events: list[KvEvent]) -> Gateway:
        assert self._rekeyer.apply(events), "something was said of blocks after one that is not known"
        return self


def named(token_ids: list[int], medium: str, start: int = 0, salt: str | None = None) -> BlocksNamed:
    keys: list[BlockKey] = [root_key("model", salt or "")]
    for i in range(0, len(token_ids), SIZE):
        keys.append(next_key(keys[-1], token_ids[i : i + SIZE]))
    parent = keys[start] if start else None
    tokens = token_ids[start * SIZE :]
    return BlocksNamed(
        keys=keys[start + 1 :], parent=parent, token_ids=tokens, salt=None if start else salt, medium=medium
    )


def test_each_medium_is_named_in_its_events() -> None:
    mirror = KvMirror()
    chain = list(range(12))
    stored, copied = mirror.apply(KvEvents(events=[named(chain, "GPU", salt="s"), named(chain, "CPU", salt="s")]))
    assert isinstance(stored, BlockStored)
    assert isinstance(copied, BlockStored)
    assert (stored.medium, copied.medium) == ("GPU", "CPU")
    assert len(mirror) == 6
    gone = BlocksForgotten(keys=named(chain, "GPU").keys[-1:], medium="CPU")
    (removed,) = mirror.apply(KvEvents(events=[gone]))
    assert removed == BlockRemoved(block_hashes=list(gone.keys), medium="CPU")


@pytest.mark.parametrize("media", [("GPU",), ("GPU", "CPU", "DISK", "MOONCAKE")], ids=len)
def test_a_snapshot_equals_the_sum_of_all_events(media: tuple[str, ...]) -> None:
    rng = random.Random(11)
    mirror, gateway = KvMirror(), Gateway()
    known: dict[str, dict[BlockKey, int]] = {medium: {} for medium in media}
    for _ in range(400):
        medium = rng.choice(media)
        held = known[medium]
        if held and rng.random() < 0.4:
            key = max(
                held, key=lambda key: (held[key], key)
            )  # the end of a chain, so that every block keeps its parent
            if any(key in other for name, other in known.items() if name != medium) or held[key] == max(
                depth for other in known.values() for depth in other.values()
            ):
                del held[key]
                event: BlocksNamed | BlocksForgotten = BlocksForgotten(keys=[key], medium=medium)
                gateway.read(mirror.apply(KvEvents(events=[event])))
            continue
        event = named([rng.randrange(3) for _ in range(SIZE * rng.randint(1, 6))], medium, salt=rng.choice([None, "a"]))
        held |= {key: i for i, key in enumerate(event.keys)}
        gateway.read(mirror.apply(KvEvents(events=[event])))
    assert {medium: len(keys) for medium, keys in known.items()} == gateway.places.counts
    assert len(mirror) == sum(map(len, known.values())) > 100
    late = Gateway().read([BlockStored(block_hashes=[b"x"], parent_block_hash=None, token_ids=[1] * 4, block_size=4)])
    assert late.read(list(mirror.snapshot())).places.held == {m: k for m, k in gateway.places.held.items() if k}


def test_a_chain_over_several_media_keeps_its_order() -> None:
    """The engine holds the end of a conversation and a tier its start: parents come first, wherever they are."""
    mirror = KvMirror()
    chain = list(range(SIZE * 6))
    events: list[BlocksNamed | BlocksForgotten] = [named(chain, "GPU"), named(chain[: SIZE * 4], "DISK")]
    events.append(BlocksForgotten(keys=named(chain, "GPU").keys[:2]))
    mirror.apply(KvEvents(events=events))
    assert Gateway().read(list(mirror.snapshot())).places.counts == {"GPU": 4, "DISK": 4}
