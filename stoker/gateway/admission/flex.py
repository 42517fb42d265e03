"""Flex requests (`service_tier: "flex"`, and the lines of batches) use only capacity that interactive requests leave idle.

A lane is idle if it has at most `flex.idle_requests` interactive requests per worker, and had no more for `flex.quiet_s`. Those
of other gateways count too, from what the workers publish. An interactive request that arrives preempts the flex requests that
can run again: they are cancelled at once, and their workers keep the prefix that they computed. Others, whose client already has
a part of the answer, run to their end.

Flex requests are not counted in the fair queue, so they take nothing from the interactive ones.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from stoker.base.errors import Overloaded
from stoker.fleet.other_load import NO_OTHERS, OtherLoad
from stoker.gateway.admission.admission_settings import FlexSettings

_TICK_S = 0.05


class FlexSlot:
    """The place of one running flex request. Its owner must call `end` on every path."""

    __slots__ = ("_gate", "_lane", "on_preempt")

    def __init__(self, gate: FlexGate, lane: str, on_preempt: Callable[[], object] | None) -> None:
        self._gate = gate
        self._lane = lane
        self.on_preempt = on_preempt  # None: it runs to its end

    def end(self) -> None:
        self._gate.ended(self._lane, self)


class FlexGate:
    """Decides when flex requests may run. `lane(model)` names the queue of a model, and `num_workers(lane)` counts its workers.

    `others(lane)` returns what other gateways have on the lane's workers.
    """

    def __init__(
        self,
        settings: FlexSettings,
        *,
        lane: Callable[[str], str | None],
        num_workers: Callable[[str], int],
        clock: Callable[[], float],
        others: Callable[[str], OtherLoad] = lambda lane: NO_OTHERS,
    ) -> None:
        self._settings = settings
        self._lane = lane
        self._num_workers = num_workers
        self._others = others
        self._clock = clock
        self._interactive: Counter[str] = Counter()
        self._busy_until_s: dict[str, float] = {}  # by lane: flex requests wait until then
        self._slots: dict[str, set[FlexSlot]] = {}
        self._waiting: dict[str, deque[object]] = {}
        self.num_preempted = 0

    @property
    def num_running(self) -> int:
        return sum(len(slots) for slots in self._slots.values())

    @property
    def num_waiting(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    def interactive_began(self, model: str) -> str:
        """Count an interactive request, and preempt flex requests of its lane. Return the lane for `interactive_ended`."""
        lane = self._lane(model) or model
        self._interactive[lane] += 1
        self._preempt(lane)
        return lane

    def other_began(self) -> None:
        """Preempt flex requests of lanes where other gateways have sent interactive ones."""
        for lane in list(self._slots):
            self._preempt(lane)

    def _preempt(self, lane: str) -> None:
        if lane in self._slots and not self._has_quiet(lane):
            for slot in list(self._slots[lane]):
                if slot.on_preempt is not None:
                    self.num_preempted += 1
                    slot.on_preempt()

    def interactive_ended(self, lane: str) -> None:
        # A model that no worker serves leaves nothing behind: a client can make up many names.
        if not self._has_quiet(lane) and self._num_workers(lane):
            self._busy_until_s[lane] = self._clock() + self._settings.quiet_s
        self._interactive[lane] -= 1
        if self._interactive[lane] <= 0:
            del self._interactive[lane]

    async def enter(self, model: str, on_preempt: Callable[[], object] | None) -> FlexSlot:
        """Wait for idle capacity, up to `flex.wait_s`. Raises Overloaded if there is none."""
        lane = self._lane(model) or model
        waiting = self._waiting.setdefault(lane, deque())
        if len(waiting) >= self._settings.max_waiting:
            raise _unavailable(f"{len(waiting)} flex requests wait already")
        turn = object()
        waiting.append(turn)
        deadline_s = asyncio.get_running_loop().time() + self._settings.wait_s
        try:
            while waiting[0] is not turn or not self._has_room(lane):
                if asyncio.get_running_loop().time() >= deadline_s:
                    raise _unavailable(f"there was no idle capacity for {self._settings.wait_s:g} s")
                await asyncio.sleep(_TICK_S)
        finally:
            waiting.remove(turn)
            if not waiting:
                self._waiting.pop(lane, None)
        slot = FlexSlot(self, lane, on_preempt)
        self._slots.setdefault(lane, set()).add(slot)
        return slot

    def ended(self, lane: str, slot: FlexSlot) -> None:
        slots = self._slots.get(lane)
        if slots is not None:
            slots.discard(slot)
            if not slots:
                del self._slots[lane]

    def _has_quiet(self, lane: str) -> bool:
        """Return True if the lane has few interactive requests now."""
        idle = self._settings.idle_requests
        most = idle and idle * max(1, self._num_workers(lane))
        num_own = self._interactive[lane]
        return num_own <= most and num_own + self._others(lane).interactive <= most

    def _has_room(self, lane: str) -> bool:
        if not self._has_quiet(lane) or self._clock() < self._busy_until_s.get(lane, 0.0):
            return False
        others = self._others(lane)
        # With `idle_requests`, a few requests of other gateways do not make the lane busy.
        if not self._settings.idle_requests and self._clock() < others.busy_s + self._settings.quiet_s:
            return False
        num_running = len(self._slots.get(lane, ())) + others.flex
        return num_running < self._settings.concurrency * max(1, self._num_workers(lane))


def _unavailable(why: str) -> Overloaded:
    return Overloaded(f"Flex requests use only idle capacity, and {why}; retry later.", code="flex_unavailable")
