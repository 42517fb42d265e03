"""Plans as bytes, the ring that carries them, and the watch that compares what ranks received."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker.base.ids import BlockId, BlockKey, Row
from stoker.kv.blocks.transfer import BlockName, KvLoad, KvTicket, LocalLoad, OfferedBlock
from stoker.parallel.collectives import ExchangeFailed
from stoker.parallel.frame_fields import FrameError
from stoker.parallel.gloo import GlooCollectives, GlooWorld
from stoker.parallel.kv_frame import KvHint, KvUpdate, LeaseChange
from stoker.parallel.plan_frame import Frame, RankCommand, decode, digest_of, encode
from stoker.parallel.plan_transport import PlansStuck
from stoker.parallel.rank_link import WAITS_FOR_RANKS, Kind, LinkMessage
from stoker.parallel.rank_watch import CHECK_EVERY_S, RankWatch
from stoker.parallel.ring import RingFiles, RingReader, RingWriter
from stoker.sched.plan import BlockCopy, BlockTableChange, NewRow, Span, StepPlan, TapeUpload
from stoker.sched.request import GrammarSpec, InputGrammar, SamplingParams, TextGrammar


def random_load(rng: random.Random, number: int) -> KvLoad:
    keys = [BlockKey(rng.randbytes(16)) for _ in range(rng.randint(0, 3))]
    blocks = [BlockId(rng.randrange(99)) for _ in keys]
    ticket = rng.choice([None, KvTicket("engine", "[::1]:7", "lease", 41, 2.5)])
    local = [LocalLoad(1, 2, keys, blocks)] * rng.randint(0, 2)
    return KvLoad(number, rng.randrange(9), keys, blocks, rng.randrange(3), ticket, local)


def random_update(rng: random.Random) -> KvUpdate:
    def name() -> BlockName:
        salt = rng.choice([None, "", "sälz"])
        return BlockName(BlockKey(rng.randbytes(16)), BlockKey(rng.randbytes(16)), (1, 2, rng.randrange(1 << 20)), salt)

    load = random_load(rng, 0)
    return KvUpdate(
        rng.randrange(99),
        [OfferedBlock(name(), BlockId(rng.randrange(99)), rng.randrange(3)) for _ in range(rng.randint(0, 2))],
        [LeaseChange("lease ü", 1, 2, load.keys, load.blocks, [name()], 3, rng.random() < 0.5)] * rng.randint(0, 2),
        ["a", "b"][: rng.randint(0, 2)],
        [KvHint([1, 2], "salt", load.ticket)] * rng.randint(0, 2),
    )


def random_plan(rng: random.Random) -> StepPlan:
    def numbers(most: int = 5) -> list[int]:
        return [rng.randrange(1 << 20) for _ in range(rng.randint(0, most))]

    spans = [
        Span(Row(i), rng.randrange(99), rng.randint(1, 4), rng.random() < 0.5, rng.randrange(3), rng.randrange(2))
        for i in range(rng.randint(0, 4))
    ]
    inputs = (
        InputGrammar("<call>", '{"input": "', '"', TextGrammar("lark", 'start: "ä"')),
        InputGrammar("[", "<value>", "</value>", TextGrammar("regex", "a+")),
    )
    grammar = rng.choice(
        [
            None,
            GrammarSpec("json_schema", '{"ü": 1}'),
            GrammarSpec("json_object"),
            GrammarSpec("structural_tag", "{}", allows_text=True, inputs=inputs),
        ]
    )
    sampling = SamplingParams(
        temperature=rng.random(),
        top_k=rng.randrange(9),
        seed=rng.randrange(1 << 63) - (1 << 62),
        logit_bias={token: rng.uniform(-5, 5) for token in numbers()},
        num_logprobs=rng.choice([None, 0, 3]),
        stop_token_ids=tuple(numbers()),
        grammar=grammar,
    )
    return StepPlan(
        spans,
        [rng.randrange(-9, 1000) for _ in range(rng.randint(0, 8))],
        [Row(row) for row in numbers()],
        [NewRow(Row(1), sampling, numbers(), 1, 7) for _ in range(rng.randint(0, 2))],
        [BlockTableChange(Row(2), 3, [BlockId(block) for block in numbers()], rng.randrange(3))],
        [BlockCopy(BlockId(1), BlockId(2), rng.randrange(3))] * rng.randint(0, 2),
        [[BlockId(block) for block in numbers()] for _ in range(rng.randint(0, 3))],
        [random_load(rng, number) for number in range(rng.randint(0, 2))],
        [TapeUpload(Row(3), 4, numbers())] * rng.randint(0, 2),
        rng.randrange(5),
    )


def test_a_plan_survives_as_bytes() -> None:
    rng = random.Random(0)
    for step in range(200):
        frame = Frame(RankCommand.STEP, step, random_plan(rng))
        assert decode(encode(frame)) == frame
        update = Frame(RankCommand.KV, step, update=random_update(rng))
        assert decode(encode(update)) == update
    assert decode(encode(Frame(RankCommand.FINISH, 7))) == Frame(RankCommand.FINISH, 7)


def test_damaged_plans_are_refused_and_nothing_else_happens() -> None:
    rng, refused = random.Random(1), 0
    for _ in range(2000):
        frame = Frame(RankCommand.STEP, 1, random_plan(rng))
        if rng.random() < 0.5:
            frame = Frame(RankCommand.KV, 1, update=random_update(rng))
        data = bytearray(encode(frame))
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        try:
            decode(bytes(data))
        except FrameError:
            refused += 1
    assert refused > 500


def test_every_reader_gets_every_frame_in_order() -> None:
    rng, files = random.Random(2), RingFiles.create(2)
    writer = RingWriter(files, 4096, 5.0)
    frames = [os.urandom(rng.choice([0, 7, 1500, 20_000])) for _ in range(200)]  # some are longer than the ring
    got: list[list[bytes]] = [[], []]

    def read(index: int) -> None:
        reader = RingReader(files.memory, files.events[index], index, 2)
        while len(got[index]) < len(frames):
            frame = reader.receive(5.0)
            assert frame is not None
            got[index].append(frame)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for frame in frames:
        writer.send(frame)
    for thread in threads:
        thread.join(10)
    assert got == [frames, frames]
    files.close()


def test_a_reader_that_stops_does_not_block_the_writer_for_ever() -> None:
    files = RingFiles.create(1)
    writer = RingWriter(files, 1024, 0.05)
    reader = RingReader(files.memory, files.events[0], 0, 1)
    assert reader.receive(0.01) is None
    writer.send(bytes(200))
    with pytest.raises(PlansStuck, match="reader 0 has not read 1,000 bytes"):
        writer.send(bytes(2000))
    assert reader.receive(0.01) == bytes(200)
    files.close()


def test_a_silent_rank_is_named_and_a_late_check_blames_no_one() -> None:
    watch = RankWatch(3, 4.0, 60.0, 0.0)
    for rank in (1, 2):
        watch.received(rank, LinkMessage(Kind.READY), 0.0)
    now = 0.0
    while now < 3.9:
        now += CHECK_EVERY_S
        watch.received(2, LinkMessage(Kind.BEAT), now)
        verdict = watch.check(now)
        assert (verdict is None) == (now < 4.0)
    assert watch.verdict == "rank 1 is lost: it sent no heartbeat for 4.0 s (limit 4 s)"
    late = RankWatch(2, 4.0, 60.0, 0.0)
    late.received(1, LinkMessage(Kind.READY), 0.0)
    assert late.check(100.0) is None  # this process did not run; nor could it read the beats


def test_a_rank_whose_start_does_not_go_on_is_named() -> None:
    """Its heartbeats go on. While it waits for other ranks, it is not to blame."""
    watch, now = RankWatch(4, 4.0, 10.0, 0.0), 0.0
    while now < 40.0:
        now += CHECK_EVERY_S
        watch.received(1, LinkMessage(Kind.BEAT, int(now / 8)), now)
        watch.received(2, LinkMessage(Kind.BEAT, WAITS_FOR_RANKS), now)
        watch.received(3, LinkMessage(Kind.BEAT, min(7, int(now))), now)
        verdict = watch.check(now)
        assert (verdict is None) == (now < 17.0)
    assert watch.verdict == "rank 3 is lost: its start made no progress for 10.0 s (limit 10 s)"


def test_the_first_reason_counts() -> None:
    watch = RankWatch(3, 4.0, 60.0, 0.0)
    watch.ended(1, -9)
    watch.received(2, LinkMessage(Kind.FAILED, text="connection reset"), 0.1)
    assert watch.verdict == "rank 1 is lost: its process ended with exit code -9"


@pytest.mark.parametrize("first", ["rank 0", "rank 1"])
def test_other_digests_name_the_rank_and_the_step(first: str) -> None:
    watch = RankWatch(3, 4.0, 60.0, 0.0)
    digest = digest_of(b"plan")
    watch.expect(Kind.RECEIVED, 1, digest)
    watch.received(1, LinkMessage(Kind.RECEIVED, 1, digest), 0.0)
    watch.received(2, LinkMessage(Kind.RECEIVED, 1, digest), 0.0)
    actions = [
        lambda: watch.expect(Kind.SAMPLED, 2, 5),
        lambda: watch.received(2, LinkMessage(Kind.SAMPLED, 2, 6), 0.0),
    ]
    for action in actions if first == "rank 0" else actions[::-1]:
        assert watch.verdict is None
        action()
    assert watch.verdict is not None
    assert watch.verdict.startswith("rank 2 has diverged: in step 2 it sampled other tokens than rank 0")


def gloo_pair() -> dict[int, GlooCollectives]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    groups: dict[int, GlooCollectives] = {}

    def connect(rank: int) -> None:
        world = GlooWorld("127.0.0.1", port, rank, 2, 20.0, None if rank else listener)
        groups[rank] = world.group("test", (0, 1))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return groups


@pytest.mark.parametrize("how", ["gather", "receive"])
def test_a_rank_that_waits_gets_an_error_when_its_group_is_closed(how: str) -> None:
    """As when another rank hangs: its connection stays open."""
    groups = gloo_pair()
    closing = threading.Timer(0.5, groups[0].close)
    closing.start()
    with pytest.raises(ExchangeFailed):
        _ = groups[0].gather(torch.ones(3)) if how == "gather" else groups[0].receive(torch.ones(3), 1).wait()
    closing.join()
    groups[1].close()


def test_a_tensor_arrives_before_it_is_waited_for() -> None:
    """Otherwise the sender would wait for a receiver that computes something else. Tensors arrive in the order of their start."""
    groups = gloo_pair()
    first, second = torch.zeros(1 << 20), torch.zeros(3)
    transfers = [groups[0].receive(into, 1) for into in (first, second)]
    for value, into in ((1.0, first), (2.0, second)):
        groups[1].send(torch.full_like(into, value), 0).wait()
    give_up_s = time.monotonic() + 30.0
    while second[0] != 2.0 and time.monotonic() < give_up_s:
        time.sleep(0.01)
    assert first[0] == first[-1] == 1.0
    for transfer in transfers:
        transfer.wait()
    assert second.tolist() == [2.0] * 3
    for group in groups.values():
        group.close()


def test_a_group_can_be_closed_while_a_tensor_is_expected() -> None:
    """As when a rank is lost between two steps. Nothing waits for the tensor any more."""
    groups = gloo_pair()
    expected = [groups[0].receive(torch.zeros(3), 1)]
    for group in groups.values():
        group.close()
    ended = threading.Event()

    def forget() -> None:
        expected.clear()
        groups.clear()
        ended.set()

    del group
    threading.Thread(target=forget, daemon=True).start()
    assert ended.wait(30.0), "the destructor of the group waits for the tensor"


def test_a_rank_waits_for_a_slow_one() -> None:
    """A step may take minutes. Longer than a rank waits at once, so that it looks whether its group was closed."""
    groups, got = gloo_pair(), torch.zeros(3)

    def be_slow() -> None:
        time.sleep(1.2)
        groups[1].send(torch.ones(3), 0).wait()
        time.sleep(0.8)
        groups[1].gather(torch.ones(3))

    slow = threading.Thread(target=be_slow)
    slow.start()
    groups[0].receive(got, 1).wait()
    assert got.tolist() == [1.0, 1.0, 1.0]
    assert len(groups[0].gather(got)) == 2
    slow.join(60)
    for group in groups.values():
        group.close()


class EndsAtTimeout:
    """A collective that ends between the timeout of a wait for it and the check whether it has ended."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> None:
        self._work.wait()
        if timeout is not None:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def test_a_collective_that_ends_just_after_a_timeout_is_no_error() -> None:
    groups = gloo_pair()
    group = groups[0]._group
    groups[0]._group = SimpleNamespace(allgather=lambda *tensors: EndsAtTimeout(group.allgather(*tensors)))
    other = threading.Thread(target=groups[1].gather, args=(torch.ones(2),))
    other.start()
    assert [one.tolist() for one in groups[0].gather(torch.zeros(2))] == [[0.0, 0.0], [1.0, 1.0]]
    other.join(60)
    groups[0]._group = group
    for each in groups.values():
        each.close()
