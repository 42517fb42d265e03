"""The upgrade board: one upgrade at a time, and what the dashboard asks for is carried out once."""

from __future__ import annotations

import pytest

from stoker.base.clock import VirtualClock
from stoker.base.errors import Overloaded
from stoker.gateway.upgrades import UpgradeBoard


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start_s=100.0)


@pytest.fixture
def board(clock: VirtualClock) -> UpgradeBoard:
    return UpgradeBoard(clock.now, "board")


def test_a_second_upgrade_is_refused_until_the_first_has_ended(board: UpgradeBoard) -> None:
    assert board.hold("one", "a:1: empty, restarting").running
    with pytest.raises(Overloaded, match=r"\(one\).*a:1: empty, restarting") as refused:
        board.hold("two", "")
    assert refused.value.code == "upgrade_running"
    with pytest.raises(Overloaded):
        board.wish([])
    board.release("two", "I never began")
    assert board.status().running
    ended = board.release("one", "2 workers were restarted")
    assert (ended.running, ended.outcome) == (False, "2 workers were restarted")
    assert board.hold("two", "").lines == []


def test_an_upgrade_that_was_killed_is_forgotten(board: UpgradeBoard, clock: VirtualClock) -> None:
    board.hold("one", "")
    clock.advance(29.0)
    with pytest.raises(Overloaded):
        board.hold("two", "")
    clock.advance(2.0)
    assert (board.status().running, board.status().outcome) == (False, "interrupted")
    assert board.hold("two", "").outcome == ""
    with pytest.raises(Overloaded):
        board.hold("one", "")  # it was only slow; it stops before its next worker


def test_an_upgrade_that_renews_keeps_its_lines(board: UpgradeBoard, clock: VirtualClock) -> None:
    board.hold("one", "first")
    clock.advance(40.0)
    assert board.hold("one", "").lines == ["first"]
    for number in range(100):
        board.hold("one", f"{number} " + "x" * 10_000)
    lines = board.status().lines
    assert len(lines) == 20
    assert lines[-1].startswith("99 ")
    assert max(map(len, lines)) == 500


def test_a_wish_is_counted_and_names_its_workers(board: UpgradeBoard) -> None:
    assert board.status().number == 0
    board.wish(["a:1"])
    wished = board.wish([])
    assert (wished.board, wished.number, wished.workers) == ("board", 2, [])


def test_the_board_knows_whether_anything_carries_out_wishes(board: UpgradeBoard, clock: VirtualClock) -> None:
    assert not board.status().followed
    assert board.status(follows=True).followed
    clock.advance(14.0)
    assert board.status().followed
    clock.advance(2.0)
    assert not board.status().followed
