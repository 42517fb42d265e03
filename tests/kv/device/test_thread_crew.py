"""A crew does everything once, in any number of hands, and leaves nobody waiting."""

from __future__ import annotations

import threading
import time

import pytest

from stoker.kv.device.thread_crew import Crew


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 37])
def test_results_come_in_the_items_order(size: int, count: int) -> None:
    crew = Crew(size, "crew")
    assert crew.each(lambda item: item * item, range(count)) == [item * item for item in range(count)]
    crew.close()
    assert crew.each(str, range(count)) == [str(item) for item in range(count)], "closed, the caller is alone"


def test_all_hands_work() -> None:
    crew, here = Crew(3, "crew"), threading.Barrier(3)
    assert crew.each(lambda _: here.wait(60) >= 0, range(3)) == [True] * 3
    crew.close()


def test_helpers_that_are_busy_elsewhere_are_not_waited_for() -> None:
    crew, until, is_inside = Crew(2, "crew"), threading.Event(), threading.Barrier(3)

    def hold(_: int) -> bool:
        is_inside.wait(60)
        return until.wait(60)

    other = threading.Thread(target=crew.each, args=(hold, range(2)))
    other.start()
    is_inside.wait(60)
    assert crew.each(str, range(5)) == ["0", "1", "2", "3", "4"]
    assert other.is_alive(), "it was waited for"
    until.set()
    other.join(60)
    crew.close()


def test_an_error_is_the_callers_and_comes_when_all_have_let_go() -> None:
    crew, running = Crew(3, "crew"), set[int]()

    def call(item: int) -> None:
        running.add(item)
        try:
            time.sleep(0.01)
            if item == 3:
                raise ValueError("three")
        finally:
            running.discard(item)

    for _ in range(5):
        with pytest.raises(ValueError, match="three"):
            crew.each(call, range(30))
        assert not running
    crew.close()
