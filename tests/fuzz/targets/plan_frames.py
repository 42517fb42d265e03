"""Plans that a rank receives from rank 0."""

from __future__ import annotations

import random

from stoker.base.ids import BlockId, Row
from stoker.parallel.plan_frame import Frame, FrameError, RankCommand, decode, encode
from stoker.sched.plan import BlockTableChange, NewRow, Span, StepPlan, TapeUpload
from stoker.sched.request import GrammarSpec, SamplingParams
from tests.fuzz.target import FuzzTarget


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
    return found


def seeds() -> list[bytes]:
    sampling = SamplingParams(seed=3, stop_token_ids=(1, 2), logit_bias={5: 1.0}, grammar=GrammarSpec("regex", "a+"))
    plan = StepPlan(
        [Span(Row(0), 0, 3, True, 1)],
        [4, 5, -2],
        [Row(1)],
        [NewRow(Row(0), sampling, [4, 5, 6], 3, 9)],
        [BlockTableChange(Row(0), 0, [BlockId(7), BlockId(8)])],
        tapes=[TapeUpload(Row(0), 3, [9, 10])],
        num_drafts=1,
        num_guesses=2,
    )
    return [encode(Frame(RankCommand.STEP, 1, plan)), encode(Frame(RankCommand.FINISH, 2))]


TARGET = FuzzTarget(execute, seeds, errors=(FrameError,), tokens=[b"STKR"], is_network=True)
