"""Plans that a rank receives from rank 0."""

from __future__ import annotations

import random

from stoker.base.ids import BlockId, BlockKey, Row
from stoker.kv.blocks.transfer import BlockName, KvLoad, KvTicket, LocalLoad, OfferedBlock
from stoker.parallel.frame_fields import FrameError
from stoker.parallel.kv_frame import KvHint, KvUpdate, LeaseChange
from stoker.parallel.plan_frame import Frame, RankCommand, decode, encode
from stoker.sched.plan import BlockTableChange, NewRow, Span, StepPlan, TapeUpload
from stoker.sched.request import GrammarSpec, SamplingParams
from tests.fuzz.target import FuzzTarget

_KEY = BlockKey(bytes(range(16)))
_TICKET = KvTicket("engine", "127.0.0.1:7", "lease", 41, 2.5)


def execute(data: bytes, rng: random.Random) -> None:
    frame = decode(data)
    assert decode(encode(frame)) == frame or any(value != value for value in _floats(frame))


def _floats(frame: Frame) -> list[float]:
    """Return what is not equal to itself after a change of its bits."""
    found: list[float] = []
    for new in frame.plan.new_rows if frame.plan is not None else ():
        sampling = new.sampling
        found += [sampling.temperature, sampling.top_p, sampling.min_p, sampling.frequency_penalty]
        found += [sampling.presence_penalty, sampling.repetition_penalty, *sampling.logit_bias.values()]
    tickets = [load.ticket for load in frame.plan.loads] if frame.plan is not None else []
    tickets += [hint.ticket for hint in frame.update.hints] if frame.update is not None else []
    return found + [ticket.lease_s for ticket in tickets if ticket is not None]


def seeds() -> list[bytes]:
    sampling = SamplingParams(seed=3, stop_token_ids=(1, 2), logit_bias={5: 1.0}, grammar=GrammarSpec("regex", "a+"))
    plan = StepPlan(
        [Span(Row(0), 0, 3, True, 1)],
        [4, 5, -2],
        [Row(1)],
        [NewRow(Row(0), sampling, [4, 5, 6], 3, 9)],
        [BlockTableChange(Row(0), 0, [BlockId(7), BlockId(8)])],
        loads=[KvLoad(1, 0, [_KEY], [BlockId(7)], 1, _TICKET, [LocalLoad(1, 0, [_KEY], [BlockId(2)])])],
        tapes=[TapeUpload(Row(0), 3, [9, 10])],
        num_drafts=1,
        num_guesses=2,
    )
    name = BlockName(_KEY, _KEY, (1, 2), "")
    update = KvUpdate(
        1,
        [OfferedBlock(name, BlockId(3))],
        [LeaseChange("lease", 0, 1, [_KEY], [BlockId(7)], [name], 2, True)],
        ["other"],
        [KvHint([1, 2], "salt", _TICKET)],
    )
    frames = [Frame(RankCommand.STEP, 1, plan), Frame(RankCommand.FINISH, 2), Frame(RankCommand.KV, 3, update=update)]
    return list(map(encode, frames))


TARGET = FuzzTarget(execute, seeds, errors=(FrameError,), tokens=[b"STKR"], is_network=True)
