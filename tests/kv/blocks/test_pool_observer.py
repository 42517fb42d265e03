"""A pool's observer knows at any time which blocks can be found."""

from __future__ import annotations

import random
from collections.abc import Sequence

from stoker.base.ids import BlockKey
from stoker.kv.blocks.keys import block_keys, root_key
from stoker.kv.blocks.pool import BlockPool

BLOCK_TOKENS = 4


class Watcher:
    def __init__(self) -> None:
        self.known: dict[BlockKey, tuple[BlockKey, list[int]]] = {}
        self.firsts: set[BlockKey] = set()

    def named(self, key: BlockKey, parent: BlockKey, token_ids: Sequence[int], root_salt: str | None) -> None:
        assert key not in self.known, "named twice"
        self.known[key] = (parent, list(token_ids))
        if root_salt is not None:
            self.firsts.add(key)

    def forgot(self, key: BlockKey) -> None:
        del self.known[key]


def test_an_observer_knows_which_blocks_can_be_found() -> None:
    rng = random.Random(1)
    watcher = Watcher()
    pool = BlockPool(12, watcher)
    root = root_key("model")
    held: list[list[int]] = []
    for _ in range(2000):
        if held and (rng.random() < 0.5 or pool.num_free < 4):
            pool.release(held.pop(rng.randrange(len(held))))  # type: ignore[arg-type]
        else:
            token_ids = [rng.randrange(2) for _ in range(BLOCK_TOKENS * rng.randint(1, 4))]
            keys = block_keys(token_ids, root, BLOCK_TOKENS)
            found = pool.match(keys)
            if pool.num_free_after(found) < len(keys) - len(found):
                continue
            pool.hold(found)
            blocks = found + pool.take(len(keys) - len(found))
            for i in range(len(found), len(keys)):
                tokens = token_ids[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
                pool.name(blocks[i], keys[i], keys[i - 1] if i else root, tokens, None if i else "")
            held.append(list(blocks))
        pool.check()
        assert len(watcher.known) == pool.num_named
        for key, (parent, token_ids) in watcher.known.items():
            assert pool.match([key])
            assert len(token_ids) == BLOCK_TOKENS
            assert (parent == root) == (key in watcher.firsts)
    assert len(watcher.firsts) > 5
