"""Tasks that would delay a request run only while the engine is idle."""

from __future__ import annotations

from stoker.engine.process.idle_tasks import IdleTask, IdleTasks


def test_tasks_run_in_order_and_in_parts() -> None:
    done: list[str] = []

    def capture() -> bool:
        done.append("capture")
        return len(done) < 3

    def warm_up() -> bool:
        done.append("warm up")
        return False

    tasks = IdleTasks([IdleTask(0.25, capture), IdleTask(2.0, warm_up)])
    waited = []
    while (wait_s := tasks.wait_s) is not None:
        waited.append(wait_s)
        tasks.run_next()
    assert done == ["capture"] * 3 + ["warm up"]
    assert waited == [0.25, 0.0, 0.0, 2.0]


def test_after_a_request_the_engine_must_be_idle_again() -> None:
    left = [1, 2, 3]

    def run() -> bool:
        left.pop()
        return bool(left)

    tasks = IdleTasks([IdleTask(0.25, run)])
    tasks.run_next()
    assert tasks.wait_s == 0.0
    tasks.interrupt()
    assert tasks.wait_s == 0.25
    tasks.run_next()
    tasks.run_next()
    assert tasks.wait_s is None
    assert not left


def test_without_tasks_there_is_nothing_to_wait_for() -> None:
    assert IdleTasks([]).wait_s is None
