"""What would disturb a request waits until there is none."""

from __future__ import annotations

from stoker.engine.process.idle_tasks import Chore, QuietTime


def test_chores_are_done_in_their_order_part_by_part() -> None:
    done: list[str] = []

    def capture() -> bool:
        done.append("capture")
        return len(done) < 3

    def warm_up() -> bool:
        done.append("warm up")
        return False

    quiet = QuietTime([Chore(0.25, capture), Chore(2.0, warm_up)])
    waited = []
    while (wait_s := quiet.wait_s) is not None:
        waited.append(wait_s)
        quiet.use()
    assert done == ["capture"] * 3 + ["warm up"]
    assert waited == [0.25, 0.0, 0.0, 2.0]


def test_after_a_request_it_has_to_be_quiet_again() -> None:
    left = [1, 2, 3]

    def run() -> bool:
        left.pop()
        return bool(left)

    quiet = QuietTime([Chore(0.25, run)])
    quiet.use()
    assert quiet.wait_s == 0.0
    quiet.disturbed()
    assert quiet.wait_s == 0.25
    quiet.use()
    quiet.use()
    assert quiet.wait_s is None
    assert not left


def test_without_chores_there_is_nothing_to_wait_for() -> None:
    assert QuietTime([]).wait_s is None
