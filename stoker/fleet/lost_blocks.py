"""LostBlocks: which blocks the workers have lost, when, and why. It answers why a prompt that was sent before is computed again.

The prefix index reports a block when its last holder of a tier has lost it. Whether another tier still holds it is not known
here: ask the index first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Literal, NamedTuple, Protocol

_Key = int | bytes
LossCause = Literal["evicted", "restarted", "left", "not_stored", "forgotten"]

_MAX_BLOCKS = 1 << 18  # about 40 MB
_BATCH = 1 << 12  # reaching the front of a large dict is slow, so some more are dropped at once


class BlockLoss(NamedTuple):
    """The time at which a block was lost, and the reason.

    `evicted`: its worker needed the space. `restarted`: its worker lost all blocks. `left`: its worker has left the fleet.
    `not_stored`: its worker never reported it. `forgotten`: the index was full, so the worker may still hold it.
    """

    at_s: float
    cause: LossCause


class BlockLosses(Protocol):
    """Receives the blocks that no worker holds any longer."""

    def note(self, keys: Iterable[_Key], cause: LossCause) -> None: ...


class NoLosses:
    """Keeps nothing."""

    def note(self, keys: Iterable[_Key], cause: LossCause) -> None:
        pass


class LostBlocks:
    """The latest losses, bounded by `max_blocks`. `clock` is the gateway's monotonic clock."""

    def __init__(self, clock: Callable[[], float], max_blocks: int = _MAX_BLOCKS) -> None:
        self._clock = clock
        self._max_blocks = max_blocks
        self._losses: dict[_Key, BlockLoss] = {}

    def __len__(self) -> int:
        return len(self._losses)

    def note(self, keys: Iterable[_Key], cause: LossCause) -> None:
        losses, loss = self._losses, BlockLoss(self._clock(), cause)
        for key in keys:
            losses.pop(key, None)  # so that it moves to the recent end
            losses[key] = loss
        excess = len(losses) - self._max_blocks
        if excess > 0:
            for key in list(islice(losses, excess + min(_BATCH, self._max_blocks // 2))):
                del losses[key]

    def run_of(self, keys: Sequence[_Key], start: int, before_s: float) -> list[tuple[int, BlockLoss]]:
        """Return the losses of the blocks from `start` on that were lost before `before_s`, up to the first other block.

        Blocks that were lost together are one entry, with the place behind the last of them.
        """
        found: list[tuple[int, BlockLoss]] = []
        last, end = None, start
        for end, key in enumerate(islice(keys, start, None), start):
            loss = self._losses.get(key)
            if loss is last and loss is not None:
                continue
            if last is not None:
                found.append((end, last))
            last = loss
            if loss is None or loss.at_s > before_s:
                return found
        if last is not None:
            found.append((end + 1, last))
        return found
