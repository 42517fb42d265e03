"""Plans over TCP: both sides prove that they know the key, frames arrive in order, and no wait is without an end."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from stoker.base.errors import StokerError
from stoker.parallel.channel import ChannelEnd, PlainChannel, SignedChannel, WrongKey, answer, call
from stoker.parallel.plan_stream import OrderReader, PlanStream, PlanStreamReader
from stoker.parallel.plan_transport import PlansStuck
from stoker.parallel.rank_link import EngineStopped, Kind, LinkEnd, LinkMessage, RankDismissed, RankLink

KEY = b"k" * 32
LONG_S = 60.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname(), timeout=LONG_S)
        return caller, listener.accept()[0]


@contextmanager
def connected() -> Iterator[tuple[SignedChannel, SignedChannel]]:
    """Yield the rank's and the head's end of a connection."""
    caller, listener = tcp_pair()
    answered: list[SignedChannel] = []
    thread = threading.Thread(target=lambda: answered.append(answer(listener, KEY, LONG_S)))
    thread.start()
    rank = call(caller, KEY, LONG_S)
    thread.join(LONG_S)
    with caller, listener:
        yield rank, answered[0]


def test_messages_go_both_ways() -> None:
    with connected() as (rank, head):
        for message in (b"", b"x", os.urandom(300_000)):
            thread = threading.Thread(target=rank.send, args=(message,))
            thread.start()
            assert head.receive() == message
            thread.join(LONG_S)
        head.send(b"back")
        assert rank.receive() == b"back"


def test_another_key_is_refused_on_both_sides() -> None:
    caller, listener = tcp_pair()
    found: list[StokerError] = []

    def serve() -> None:
        try:
            answer(listener, b"other", LONG_S)
        except StokerError as error:
            found.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(WrongKey, match="another secret"):
        call(caller, KEY, LONG_S)
    caller.close()
    thread.join(LONG_S)
    assert isinstance(found[0], WrongKey)
    listener.close()


def test_a_head_that_does_not_know_the_key_learns_nothing_to_repeat() -> None:
    """A false head passes on the challenge of a real one: it gets no further, because both numbers are in the proofs."""
    caller, false_head = tcp_pair()
    thread = threading.Thread(target=lambda: false_head.sendall(false_head.recv(32) + bytes(32)))
    thread.start()
    with pytest.raises(WrongKey):
        call(caller, KEY, LONG_S)
    thread.join(LONG_S)
    caller.close()
    false_head.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(99), os.urandom(200), b""])
def test_a_stranger_does_not_get_through_the_handshake(data: bytes) -> None:
    caller, listener = tcp_pair()
    caller.sendall(data)
    caller.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelEnd):
        answer(listener, KEY, LONG_S)
    caller.close()
    listener.close()


def test_a_stranger_who_sends_nothing_is_given_up() -> None:
    caller, listener = tcp_pair()
    with pytest.raises(ChannelEnd):
        answer(listener, KEY, 0.05)
    caller.close()
    listener.close()


class Tap:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.sent = b""

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def settimeout(self, seconds: float) -> None: ...

    def setsockopt(self, *options: int) -> None: ...


@pytest.mark.parametrize("how", ["changed", "repeated", "other direction", "left out"])
def test_messages_of_a_stranger_are_refused(how: str) -> None:
    tap = Tap()
    sender = SignedChannel(tap, b"to head", b"to rank")  # type: ignore[arg-type]
    sender.send(b"first")
    first, tap.sent = tap.sent, b""
    sender.send(b"second")
    second = tap.sent
    data = {
        "changed": first.replace(b"first", b"worst"),
        "repeated": first + first,
        "other direction": first,
        "left out": second,
    }[how]
    ours, theirs = tcp_pair()
    keys = (b"to head", b"to rank") if how == "other direction" else (b"to rank", b"to head")
    receiver = SignedChannel(ours, *keys)
    theirs.sendall(data)
    if how == "repeated":
        assert receiver.receive() == b"first"
    with pytest.raises(ChannelEnd, match="wrong signature"):
        receiver.receive()
    ours.close()
    theirs.close()


def test_a_message_that_claims_to_be_huge_takes_no_memory() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ChannelEnd, match="4,294,967,295 bytes"):
        PlainChannel(ours).receive()
    ours.close()
    theirs.close()


def never(error: StokerError) -> None: ...


def test_every_frame_arrives_in_order_over_tcp() -> None:
    rng = random.Random(3)
    frames = [os.urandom(rng.choice([1, 7, 9000, 100_000, 3 << 20])) for _ in range(60)]
    with connected() as (rank, head):
        plans = PlanStreamReader(OrderReader(RankLink(rank), never, max_bytes=1 << 20))
        stream = PlanStream(RankLink(head), 3, LONG_S, max_bytes=1 << 20)
        sending = threading.Thread(target=lambda: [stream.send(frame) for frame in frames])
        sending.start()
        assert [plans.receive(LONG_S) for _ in frames] == frames
        sending.join(LONG_S)
        assert plans.receive(0.01) is None
        stream.close()


def send_often(stream: PlanStream, frame: bytes) -> None:
    for _ in range(10_000):
        stream.send(frame)


def test_a_rank_that_reads_nothing_is_named_within_the_deadline() -> None:
    with connected() as (_rank, head):
        stream = PlanStream(RankLink(head), 3, 0.1, max_bytes=1 << 20)
        with pytest.raises(PlansStuck, match=r"rank 3 has not read [\d,]+ bytes of plans for 0.1 s"):
            send_often(stream, bytes(1 << 20))
        stream.close()


def test_plans_for_a_rank_that_is_gone_are_an_error() -> None:
    with connected() as (rank, head):
        stream = PlanStream(RankLink(head), 3, LONG_S)
        rank.close()
        with pytest.raises(PlansStuck, match="rank 3 cannot be reached"):
            send_often(stream, bytes(100))
        stream.close()


@pytest.mark.parametrize(
    ("message", "kind"),
    [(LinkMessage(Kind.FAILED, text="rank 2 is lost"), RankDismissed), (LinkMessage(Kind.BYE), EngineStopped)],
)
def test_a_rank_learns_why_it_ends_while_it_computes(message: LinkMessage, kind: type[StokerError]) -> None:
    found, told = [], threading.Event()

    def on_end(error: StokerError) -> None:
        found.append(error)
        told.set()

    with connected() as (rank, head):
        reader = OrderReader(RankLink(rank), on_end)
        RankLink(head).send(LinkMessage(Kind.PLAN, frame=b"plan"))
        RankLink(head).send(message)
        assert told.wait(LONG_S)
        assert type(found[0]) is kind
        assert message.text in found[0].message
        first = reader.next(0.0)
        assert first is not None
        assert first.frame == b"plan"


def test_damaged_link_messages_end_the_link() -> None:
    rng = random.Random(5)
    for _ in range(300):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            PlainChannel(theirs).send(os.urandom(rng.choice([0, 1, 23, 24, 60])))
            with suppress(LinkEnd):
                RankLink(PlainChannel(ours)).receive().table(Kind.HELLO)
