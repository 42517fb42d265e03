"""EventLoop: the virtual clock. Callbacks run in the order of their times; at equal times in the order of their scheduling."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class ScheduledEvent:
    """A callback that will run at its time, unless it is cancelled."""

    __slots__ = ("act", "time_s")

    def __init__(self, time_s: float, act: Callable[[], None]) -> None:
        self.time_s = time_s
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        self.act = None


class EventLoop:
    """Runs scheduled callbacks. `now_s` is the time of the callback that is running; it is never real time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, ScheduledEvent]] = []
        self._num_scheduled = 0

    def at(self, time_s: float, act: Callable[[], None]) -> ScheduledEvent:
        """Run `act` at `time_s`, or now if that time has passed."""
        if time_s < self.now_s:
            time_s = self.now_s
        event = ScheduledEvent(time_s, act)
        self._num_scheduled = number = self._num_scheduled + 1
        heappush(self._heap, (time_s, number, event))
        return event

    def after(self, delay_s: float, act: Callable[[], None]) -> ScheduledEvent:
        return self.at(self.now_s + delay_s, act)

    def run(self, until_s: float = float("inf")) -> None:
        """Run events until none is left, or until the next one is later than `until_s`."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, event = heappop(heap)
            if (act := event.act) is not None:
                self.num_events += 1
                act()
