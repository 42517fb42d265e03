"""The token counts of a request that is being answered: what the ledger bills if the gateway is lost now.

The request path updates the counts before it sends the bytes that they describe. Admission may read them at any time.
"""

from __future__ import annotations

from typing import Protocol

from stoker.gateway.records.usage_row import MAX_TOKENS, UsageHead, UsageRow
from stoker.gateway.store.slot_file import NUM_CELLS, SlotFile

# The cells, as the request path writes them. STATUS is the HTTP status once the answer is complete.
PROMPT, CACHED, COMPLETION, STATUS = range(NUM_CELLS)


class RunningUsage:
    """The counts of one request. This class keeps them in the memory of the process only."""

    __slots__ = ("cells",)

    def __init__(self, cells: memoryview | None = None) -> None:
        self.cells = memoryview(bytearray(8 * NUM_CELLS)).cast("Q") if cells is None else cells

    @property
    def prompt_tokens(self) -> int:
        return int(self.cells[PROMPT])

    @property
    def cached_tokens(self) -> int:
        return int(self.cells[CACHED])

    @property
    def completion_tokens(self) -> int:
        """Return how many tokens the client was sent so far."""
        return int(self.cells[COMPLETION])

    def note_worker(self, worker_id: str) -> None:
        """Note the worker that answers now."""

    def update(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """Set all counts. They may be wrong numbers from a worker."""
        cells = self.cells
        cells[PROMPT] = prompt_tokens if 0 <= prompt_tokens <= MAX_TOKENS else _bounded(prompt_tokens)
        cells[CACHED] = cached_tokens if 0 <= cached_tokens <= MAX_TOKENS else _bounded(cached_tokens)
        cells[COMPLETION] = completion_tokens if 0 <= completion_tokens <= MAX_TOKENS else _bounded(completion_tokens)


# Stands in for the counts of a request that is not admitted yet.
NOT_ADMITTED = RunningUsage()


def _bounded(count: int) -> int:
    return min(max(count, 0), MAX_TOKENS)


class SlotUsage(RunningUsage):
    """Counts that lie in a slot of the write-ahead file, so that they survive the process."""

    __slots__ = ("_slots", "index")

    def __init__(self, slots: SlotFile, index: int) -> None:
        self.cells = slots.cells(index)
        self._slots = slots
        self.index = index

    def note_worker(self, worker_id: str) -> None:
        self._slots.write_note(self.index, worker_id)


class UsageLedger(Protocol):
    """Takes one row for each admitted request, in two steps."""

    def open(self, head: UsageHead) -> RunningUsage:
        """Write the row ahead. Raises Overloaded if the ledger can take no more."""

    def settle(self, running: RunningUsage, row: UsageRow) -> None:
        """Put the final row in place of the one written ahead."""
