"""HeldBlocks: the blocks that one sequence holds in one KV set. Only BlockSets changes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.ids import BlockId

NO_BLOCK = BlockId(-1)


@dataclass(slots=True)
class HeldBlocks:
    """The blocks of one sequence in one KV set, by their number. All before `first` are released.

    A block that a load has skipped is NO_BLOCK.
    """

    ids: list[BlockId] = field(default_factory=list)
    first: int = 0

    def between(self, first: int, end: int) -> list[BlockId]:
        """Return the held blocks with numbers from `first` to before `end`."""
        found = self.ids[max(first, self.first) : end]
        return [block for block in found if block != NO_BLOCK] if NO_BLOCK in found else found

    def numbered(self, first: int, end: int) -> list[tuple[int, BlockId]]:
        """Return the held blocks with numbers from `first` to before `end`, each with its number."""
        start = max(first, self.first)
        return [(number, block) for number, block in enumerate(self.ids[start:end], start) if block != NO_BLOCK]

    @property
    def held(self) -> list[BlockId]:
        return self.between(0, len(self.ids))

    def find(self, number: int) -> BlockId | None:
        """Return the block of this number, or None if the sequence does not hold it."""
        block = self.ids[number] if self.first <= number < len(self.ids) else NO_BLOCK
        return None if block == NO_BLOCK else block

    def table_entries(self, first: int) -> list[BlockId]:
        """Return the entries of a block table from number `first` on. Those without a block are never read."""
        entries = self.ids[first:]
        return [BlockId(max(0, block)) for block in entries] if NO_BLOCK in entries else entries
