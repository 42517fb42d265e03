"""A StepPlan as bytes, for the ranks that execute it: one array of integers, one of floats, and text.

Plain numpy arrays, because engine-side packages have no serialisation library, and pickles from a socket run code. Rank 0
encodes each plan once for all ranks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Any, Literal, get_args

import numpy as np

from stoker.base.ids import BlockId, Row
from stoker.parallel.frame_fields import FrameError, FrameReader, FrameWriter
from stoker.parallel.kv_frame import KvUpdate, put_loads, put_update, take_loads, take_update
from stoker.sched.plan import BlockCopy, BlockTableChange, NewRow, Span, StepPlan, TapeUpload
from stoker.sched.request import GrammarKind, GrammarSpec, InputGrammar, SamplingParams, TextGrammar

_HEAD = struct.Struct("<4sHHqqqq")  # magic, version, command, step, counts of integers, floats and bytes of text
_MAGIC, _VERSION = b"STKR", 2
_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
_SYNTAXES: tuple[Literal["lark", "regex"], ...] = ("lark", "regex")
_NONE = -(1 << 62)  # an integer that is None


class RankCommand(IntEnum):
    """What the ranks are to do."""

    STEP = 1  # launch a plan
    FINISH = 2  # sample the tokens of the oldest unfinished step; only with several stages
    WARM_UP = 3
    CAPTURE_NEXT = 4
    CAPTURE_ALL = 5
    KV = 6  # blocks for the store, leases and hints
    CLOSE_KV = 7  # write what waits for the tiers; no loads follow


@dataclass(frozen=True, slots=True)
class Frame:
    """A command to all ranks. `step` counts the commands, so that a lost one is noticed."""

    command: RankCommand
    step: int
    plan: StepPlan | None = None
    update: KvUpdate | None = None


def digest_of(data: bytes | memoryview) -> int:
    """Return the digest of a frame or of sampled tokens, a positive number of 63 bits."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    writer = FrameWriter()
    if frame.plan is not None:
        _put_plan(writer, frame.plan)
    if frame.update is not None:
        put_update(writer, frame.update)
    sizes = (len(writer.ints), len(writer.floats), len(writer.text))
    return b"".join(
        (
            _HEAD.pack(_MAGIC, _VERSION, frame.command, frame.step, *sizes),
            np.array(writer.ints, np.int64).tobytes(),
            np.array(writer.floats, np.float64).tobytes(),
            writer.text,
        )
    )


def decode(data: bytes) -> Frame:
    """Return the frame. Raises FrameError if the bytes are not one."""
    try:
        magic, version, command, step, num_ints, num_floats, num_text = _HEAD.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise FrameError(f"magic {magic!r} and version {version}, expected {_MAGIC!r} and {_VERSION}")
        first = _HEAD.size
        if min(num_ints, num_floats, num_text) < 0 or first + 8 * (num_ints + num_floats) + num_text != len(data):
            raise FrameError(f"{len(data)} bytes for {num_ints} integers, {num_floats} floats and {num_text} of text")
        middle = first + 8 * num_ints
        ints = np.frombuffer(data[first:middle], np.int64).tolist()
        end = middle + 8 * num_floats
        reader = FrameReader(ints, np.frombuffer(data[middle:end], np.float64).tolist(), bytes(data[end:]))
        plan = _take_plan(reader) if command == RankCommand.STEP else None
        update = take_update(reader) if command == RankCommand.KV else None
        return Frame(RankCommand(command), step, plan, update)
    except (struct.error, ValueError, StopIteration, RuntimeError, IndexError) as error:
        raise FrameError(f"a plan of {len(data)} bytes cannot be read ({error!r})") from error


def _put_plan(writer: FrameWriter, plan: StepPlan) -> None:
    writer.put(len(plan.spans), plan.num_drafts, plan.num_guesses, plan.is_interruptible, plan.runs_alone)
    for span in plan.spans:
        writer.put(span.row, span.start, span.count, span.samples, span.num_drafts, span.slack, span.in_prompt)
        writer.put(span.next_id)
    writer.put_list(plan.token_ids)
    writer.put_list(plan.freed_rows)
    writer.put(len(plan.new_rows))
    for new in plan.new_rows:
        writer.put(new.row, new.num_prompt, new.max_new_tokens)
        writer.put_list(new.token_ids)
        _put_sampling(writer, new.sampling)
    writer.put(len(plan.block_table_changes))
    for change in plan.block_table_changes:
        writer.put(change.row, change.first, change.kv_set)
        writer.put_list(change.blocks)
    writer.put_list([number for copy in plan.copies for number in (copy.src, copy.dst, copy.kv_set)])
    writer.put(len(plan.fresh_blocks))
    for fresh in plan.fresh_blocks:
        writer.put_list(fresh)
    writer.put(len(plan.tapes))
    for tape in plan.tapes:
        writer.put(tape.row, tape.start)
        writer.put_list(tape.token_ids)
    put_loads(writer, plan.loads)


def _take_plan(reader: FrameReader) -> StepPlan:
    num_spans, num_drafts, num_guesses, is_interruptible, runs_alone = reader.take(5)
    spans = []
    for _ in range(num_spans):
        row, start, count, samples, drafts, slack, in_prompt, next_id = reader.take(8)
        spans.append(Span(Row(row), start, count, bool(samples), drafts, slack, bool(in_prompt), next_id))
    token_ids, freed = reader.take_list(), reader.take_list()
    new_rows = []
    for _ in range(reader.one()):
        row, num_prompt, max_new_tokens = reader.take(3)
        known = reader.take_list()
        new_rows.append(NewRow(Row(row), _take_sampling(reader), known, num_prompt, max_new_tokens))
    changes = []
    for _ in range(reader.one()):
        row, first, kv_set = reader.take(3)
        changes.append(BlockTableChange(Row(row), first, [BlockId(block) for block in reader.take_list()], kv_set))
    numbers = reader.take_list()
    copies = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    fresh = [[BlockId(block) for block in reader.take_list()] for _ in range(reader.one())]
    tapes = []
    for _ in range(reader.one()):
        row, start = reader.take(2)
        tapes.append(TapeUpload(Row(row), start, reader.take_list()))
    return StepPlan(
        spans,
        token_ids,
        [Row(row) for row in freed],
        new_rows,
        changes,
        [BlockCopy(BlockId(src), BlockId(dst), kv_set) for src, dst, kv_set in copies],
        fresh,
        take_loads(reader),
        tapes,
        num_drafts,
        num_guesses,
        bool(is_interruptible),
        bool(runs_alone),
    )


_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def _put_sampling(writer: FrameWriter, sampling: SamplingParams) -> None:
    writer.floats += [getattr(sampling, name) for name in _FLOATS]
    logprobs = _NONE if sampling.num_logprobs is None else sampling.num_logprobs
    writer.put(sampling.top_k, sampling.seed, logprobs, sampling.min_tokens)
    writer.put_list(sampling.stop_token_ids)
    writer.put_list(sampling.logit_bias)
    writer.floats += sampling.logit_bias.values()
    writer.put(-1 if sampling.grammar is None else _KINDS.index(sampling.grammar.kind))
    if sampling.grammar is not None:
        _put_grammar(writer, sampling.grammar)


def _put_grammar(writer: FrameWriter, spec: GrammarSpec) -> None:
    writer.put_text(spec.text)
    writer.put(spec.allows_text, len(spec.inputs))
    for one in spec.inputs:
        writer.put(_SYNTAXES.index(one.grammar.syntax))
        for text in (one.begin, one.opening, one.end, one.grammar.definition):
            writer.put_text(text)


def _take_grammar(reader: FrameReader, kind: GrammarKind) -> GrammarSpec:
    text = reader.text()
    allows_text, num_inputs = reader.take(2)
    inputs = []
    for _ in range(num_inputs):
        syntax = _SYNTAXES[reader.one()]
        begin, opening, end, definition = (reader.text() for _ in range(4))
        inputs.append(InputGrammar(begin, opening, end, TextGrammar(syntax, definition)))
    return GrammarSpec(kind, text, bool(allows_text), tuple(inputs))


def _take_sampling(reader: FrameReader) -> SamplingParams:
    floats: dict[str, Any] = dict(zip(_FLOATS, reader.floats(len(_FLOATS)), strict=True))
    top_k, seed, logprobs, min_tokens = reader.take(4)
    stops, biased = tuple(reader.take_list()), reader.take_list()
    bias = dict(zip(biased, reader.floats(len(biased)), strict=True))
    kind = reader.one()
    return SamplingParams(
        **floats,
        top_k=top_k,
        seed=seed,
        num_logprobs=None if logprobs == _NONE else logprobs,
        min_tokens=min_tokens,
        stop_token_ids=stops,
        logit_bias=bias,
        grammar=None if kind < 0 else _take_grammar(reader, _KINDS[kind]),
    )
