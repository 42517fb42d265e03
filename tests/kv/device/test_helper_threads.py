"""HelperThreads process every item once, whatever the number of threads, and no caller waits for busy helpers."""

from __future__ import annotations

import threading
import time

import pytest

from stoker.kv.device.helper_threads import HelperThreads


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 37])
def test_results_are_in_the_order_of_the_items(size: int, count: int) -> None:
    threads = HelperThreads(size, "threads")
    assert threads.each(lambda item: item * item, range(count)) == [item * item for item in range(count)]
    threads.close()
    assert threads.each(str, range(count)) == [str(item) for item in range(count)], "closed, the caller is alone"


def test_all_threads_work() -> None:
    threads, here = HelperThreads(3, "threads"), threading.Barrier(3)
    assert threads.each(lambda _: here.wait(60) >= 0, range(3)) == [True] * 3
    threads.close()


def test_the_caller_does_not_wait_for_busy_helpers() -> None:
    threads, until, is_inside = HelperThreads(2, "threads"), threading.Event(), threading.Barrier(3)

    def hold(_: int) -> bool:
        is_inside.wait(60)
        return until.wait(60)

    other = threading.Thread(target=threads.each, args=(hold, range(2)))
    other.start()
    is_inside.wait(60)
    assert threads.each(str, range(5)) == ["0", "1", "2", "3", "4"]
    assert other.is_alive(), "it was waited for"
    until.set()
    other.join(60)
    threads.close()


def test_an_error_is_raised_in_the_caller_after_all_threads_have_stopped() -> None:
    threads, running = HelperThreads(3, "threads"), set[int]()

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
            threads.each(call, range(30))
        assert not running
    threads.close()
