"""KV events with an engine's own hashes become prefix keys, for any block size, medium and salt."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from stoker.base.ids import WorkerId
from stoker.fleet.prefix_index import Match, PrefixIndex
from stoker.gateway.prefix.prefix_keys import root_key, token_keys
from stoker.gateway.watch.rekey import Rekeyer, StoreBlocks, WorkerIndex
from stoker.kv.blocks.keys import salt_hash
from stoker.proto.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored

W = WorkerId("w")
TOKENS = list(range(1000, 1096))


def keys(tokens: list[int], block_tokens: int, salt: str | None = None) -> list[int]:
    return token_keys(array("I", tokens), root_key(salt_hash(salt) if salt else None), block_tokens)


class World:
    def __init__(self, block_tokens: int, hashes_salts: bool = True) -> None:
        self.index = PrefixIndex()
        self.rekeyer = Rekeyer(WorkerIndex(W, [self.index]), block_tokens, hashes_salts=hashes_salts)
        self.block_tokens = block_tokens

    def held(self, tokens: list[int], salt: str | None = None) -> int:
        found = self.index.match(keys(tokens, self.block_tokens, salt)).get(W)
        return found.blocks if found else 0


def stored(
    hashes: list[Any], tokens: list[int], size: int, parent: BlockHash | None = None, **more: Any
) -> BlockStored:
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=size, **more)


@pytest.mark.parametrize(("theirs", "ours"), [(16, 16), (32, 16), (4, 16), (1, 16), (24, 16), (16, 24)])
def test_any_block_size_of_theirs(theirs: int, ours: int) -> None:
    world = World(ours)
    count = 96 // theirs
    hashes = list(range(count))
    half = count // 2
    assert world.rekeyer.apply([stored(hashes[:half], TOKENS[: half * theirs], theirs)])
    assert world.held(TOKENS) == half * theirs // ours
    assert world.rekeyer.apply([stored(hashes[half:], TOKENS[half * theirs :], theirs, hashes[half - 1])])
    assert world.held(TOKENS) == 96 // ours
    for last in reversed(range(count)):
        world.rekeyer.apply([BlockRemoved(block_hashes=[last])])
        assert world.held(TOKENS) == last * theirs // ours
    assert len(world.rekeyer._blocks) == 0
    assert len(world.index) == 0


def test_media_are_distinguished_and_a_copy_needs_no_tokens() -> None:
    world = World(16)
    world.rekeyer.apply([stored([b"a", b"b"], TOKENS[:32], 16, medium="GPU")])
    world.rekeyer.apply([stored([b"a", b"b", b"unknown"], [], 16, medium="CPU")])
    world.rekeyer.apply([BlockRemoved(block_hashes=[b"b", b"a"], medium="GPU")])
    match = world.index.match(keys(TOKENS, 16))[W]
    assert (match.device_blocks, match.host_blocks) == (0, 2)
    world.rekeyer.apply([stored([b"c"], TOKENS[32:48], 16, b"b", medium="STORAGE")])
    assert world.index.match(keys(TOKENS, 16))[W].disk_blocks == 1
    world.rekeyer.apply([BlockRemoved(block_hashes=[b"a", b"b"], medium="CPU"), BlockRemoved(block_hashes=[b"c"])])
    assert world.held(TOKENS) == 0
    assert len(world.rekeyer._blocks) == 1  # c is still in the store; the removal named a GPU copy that never existed


@pytest.mark.parametrize(
    "more",
    [{"extra_keys": [["salt"], None]}, {"cache_salt": "salt"}, {"cache_salt": "salt", "extra_keys": [None, None]}],
)
def test_a_salt_is_the_chain_s(more: dict[str, Any]) -> None:
    world = World(16)
    world.rekeyer.apply([stored([1, 2], TOKENS[:32], 16, **more), stored([3], TOKENS[32:48], 16, 2)])
    assert world.held(TOKENS) == 0
    assert world.held(TOKENS, "salt") == 3


def test_our_workers_send_salts_hashed() -> None:
    world = World(16, hashes_salts=False)
    world.rekeyer.apply([stored([1], TOKENS[:16], 16, extra_keys=[[salt_hash("salt")]])])
    assert world.held(TOKENS, "salt") == 1


def test_blocks_with_an_image_are_not_found_by_their_placeholders() -> None:
    world = World(16)
    world.rekeyer.apply([stored([1, 2, 3], TOKENS[:48], 16, extra_keys=[None, [["image", 0]], None])])
    assert world.held(TOKENS) == 1


def test_adapters_and_sliding_windows_are_passed_over() -> None:
    world = World(16)
    assert world.rekeyer.apply(
        [
            stored([1], TOKENS[:16], 16, lora_name="adapter"),
            stored([2], TOKENS[:16], 16, group_idx=1, kv_cache_spec_kind="sliding_window"),
        ]
    )
    assert world.held(TOKENS) == 0
    world.rekeyer.apply([stored([2], TOKENS[:16], 16, group_idx=0, kv_cache_spec_kind="full_attention")])
    world.rekeyer.apply([BlockRemoved(block_hashes=[2], group_idx=1)])
    assert world.held(TOKENS) == 1
    world.rekeyer.apply([BlockRemoved(block_hashes=[2], group_idx=0)])
    assert world.held(TOKENS) == 0


def test_an_unknown_parent_is_reported_and_the_rest_is_applied() -> None:
    world = World(16)
    assert not world.rekeyer.apply([stored([9], TOKENS[:16], 16, 8), stored([1], TOKENS[:16], 16)])
    assert world.held(TOKENS) == 1
    assert world.rekeyer.apply([AllBlocksCleared()])
    assert world.held(TOKENS) == 0


def test_a_block_out_of_the_middle_ends_the_match_there() -> None:
    world = World(16)
    world.rekeyer.apply([stored([1, 2, 3], TOKENS[:48], 16), BlockRemoved(block_hashes=[2])])
    assert world.held(TOKENS) == 1
    world.rekeyer.apply([stored([2], TOKENS[16:32], 16, 1)])
    assert world.held(TOKENS) == 3


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_stores_and_removals_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    world = World(4)
    held: dict[tuple[int, ...], None] = {}
    for _ in range(400):
        if held and rng.random() < 0.4:
            gone = rng.choice(list(held))
            del held[gone]
            world.rekeyer.apply([BlockRemoved(block_hashes=[hash(gone)])])
        else:
            tokens = tuple(rng.randrange(2) for _ in range(4 * rng.randint(1, 5)))
            for end in range(4, len(tokens) + 1, 4):
                chain = tokens[:end]
                if chain not in held:
                    parent = hash(chain[:-4]) if end > 4 else None
                    if world.rekeyer.apply([stored([hash(chain)], list(chain[-4:]), 4, parent)]):
                        held[chain] = None
    found = {key for chain in held for key in keys(list(chain), 4)[-1:]}
    assert set(world.index._holders[W].held[0]) == found
    assert len(world.rekeyer._blocks) == len(held)


def test_what_one_worker_put_into_a_store_another_may_remove_or_go_on_from() -> None:
    index, other = PrefixIndex(), WorkerId("other")
    blocks = {"CPU": StoreBlocks()}
    first, second = (
        Rekeyer(WorkerIndex(worker, [index]), 16, hashes_salts=False, stores=blocks) for worker in (W, other)
    )
    for worker in (W, other):
        index.share(worker, {"CPU": "ram"})
    assert first.apply([stored([1, 2, 3], TOKENS[:48], 16, medium="CPU"), stored([1], TOKENS[:16], 16, medium="GPU")])
    assert index.match(keys(TOKENS, 16)) == {W: Match(1, 2, 0), other: Match(0, 3, 0)}
    assert second.apply([stored([4], TOKENS[48:64], 16, 3, medium="CPU")]), "a block after one that it never told of"
    assert index.match(keys(TOKENS, 16))[W] == Match(1, 3, 0)
    assert second.apply([BlockRemoved(block_hashes=[2], medium="CPU")])
    assert index.match(keys(TOKENS, 16)) == {W: Match(1, 0, 0), other: Match(0, 1, 0)}
    assert first.apply([AllBlocksCleared()])
    assert index.match(keys(TOKENS, 16)) == {W: Match(0, 1, 0), other: Match(0, 1, 0)}, "the store's stay"


def test_a_full_store_forgets_its_oldest_some_at_a_time() -> None:
    """The front of a large dict is slow to reach, so entries are dropped in batches."""
    blocks = {"CPU": StoreBlocks()}
    rekeyer = Rekeyer(WorkerIndex(W, [PrefixIndex()]), 16, hashes_salts=False, stores=blocks, max_blocks=5120)
    rekeyer.apply(stored([number], [number] * 16, 16, medium="CPU") for number in range(5121))
    assert list(blocks["CPU"]) == list(range(11, 5121))
