"""The scripted family: an automaton over the tokens, behind the real scheduler, KV cache, tiers and hand-off. CPU only.

It counts the beginnings of turns of the assistant (`script.turn` in config.json, token ids). After the n-th one it gives the
n-th answer (`script.answers`), and then `script.end`. After the last answer it repeats that one.

Its state after each token is the V of that token, so it is lost and found with the KV: a wrong block gives a wrong answer. A step
reads the state before its first token and computes the others from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from stoker.kernels.attention import SpanGroup
from stoker.kernels.attention_rows import RowGroup
from stoker.kernels.cpu_int8 import Int8Kernel
from stoker.kernels.kv_pages import kv_read, kv_write
from stoker.kv.blocks.layout import KvGroup
from stoker.layers.batch import ForwardBatch, GroupInputs
from stoker.layers.features import Tap
from stoker.models.family import MODELS, Model, ModelShape, Rule

_WIDTH = 16  # of K and V
_DIGIT = 128  # integers up to here are exact in every floating-point dtype of more than 8 bits
_LOGIT = 100.0


class Script(NamedTuple):
    turn: list[int]
    answers: list[list[int]]
    end: int

    def next_token(self, state: ScriptState) -> int:
        if not state.turns:
            return self.end
        answer = self.answers[min(state.turns, len(self.answers)) - 1]
        return answer[state.since] if state.since < len(answer) else self.end


class ScriptState(NamedTuple):
    """`turns` began so far, the last one `since` tokens ago; `matched` tokens of the next beginning were seen."""

    turns: int = 0
    since: int = 0
    matched: int = 0

    def after(self, token: int, turn: Sequence[int]) -> ScriptState:
        matched = self.matched + 1 if token == turn[self.matched] else int(token == turn[0])
        if matched == len(turn):
            return ScriptState(self.turns + 1)
        return ScriptState(self.turns, self.since + 1, matched)

    def values(self) -> list[int]:
        return [*_digits(self.turns), *_digits(self.since), self.matched]

    @classmethod
    def of(cls, values: list[int]) -> ScriptState:
        return cls(_number(values[:3]), _number(values[3:6]), values[6])


def _digits(number: int) -> list[int]:
    return [number // _DIGIT**2, number // _DIGIT % _DIGIT, number % _DIGIT]


def _number(digits: Sequence[int]) -> int:
    return (digits[0] * _DIGIT + digits[1]) * _DIGIT + digits[2]


@MODELS.register("ScriptedForCausalLM")
class ScriptedFamily:
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, hf: Mapping[str, Any]) -> None:
        script = hf["script"]
        self._script = Script(script["turn"], script["answers"], script["end"])
        self.shape = ModelShape(
            vocab_size=hf["vocab_size"],
            hidden_size=4,
            max_positions=hf["max_position_embeddings"],
            num_layers=1,
            num_kv_heads=1,
            head_dim=_WIDTH,
            num_heads=1,
            active_weights=1 << 20,
        )
        self.kv_groups = (KvGroup(1, 1, _WIDTH),)
        self.rules = [Rule("pace", "pace")]
        self.ignored: frozenset[str] = frozenset()

    def build(self, num_positions: int) -> Model:
        return ScriptedModel(self._script, self.shape)


class ScriptedModel(nn.Module):
    has_sinks = False

    def __init__(self, script: Script, shape: ModelShape) -> None:
        super().__init__()
        self._script = script
        self._shape = shape
        self.pace = nn.Parameter(torch.empty(1), requires_grad=False)  # a model must have weights

    def forward(self, batch: ForwardBatch, taps: Sequence[Tap] = (), entering: Tensor | None = None) -> Tensor:
        """Return the digits of each token's successor."""
        where = batch.groups[0]
        states = self._states(batch.token_ids.tolist(), batch.positions.tolist(), where)
        value = self.pace.new_zeros(len(states), 1, _WIDTH)
        value[:, 0, :7] = torch.tensor([state.values() for state in states], dtype=value.dtype)
        pages = where.kv.pages(0)
        kv_write(torch.zeros_like(value), pages, where.slots)
        kv_write(value, pages[1:], where.slots)
        successors = [_digits(self._script.next_token(state)) for state in states]
        return torch.tensor([[*digits, 1] for digits in successors], dtype=self.pace.dtype)

    def _states(self, tokens: list[int], positions: list[int], where: GroupInputs) -> list[ScriptState]:
        before = _states_before(where, positions)
        slots, states = where.slots.tolist(), list[ScriptState]()
        for i, token in enumerate(tokens):
            state = ScriptState()
            if positions[i]:
                slot = before.get(i)
                if slot is None or (i and slot == slots[i - 1]):  # computed in this step
                    state = states[i - 1]
                else:
                    state = _read(where, slot)
            states.append(state.after(token, self._script.turn))
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        ids = [_number(row[:3]) for row in hidden.round().long().tolist()]
        logits = hidden.new_zeros(len(ids), self._shape.vocab_size)
        logits[range(len(ids)), ids] = _LOGIT
        return logits

    def join(self, mesh: object) -> None:
        """Give a rank the other ranks. This model runs on one."""

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        pass

    @property
    def bytes_per_token(self) -> int:
        return 1024


def _states_before(where: GroupInputs, positions: list[int]) -> dict[int, int]:
    """Return, for the first token of each span, the slot of the token before it."""
    assert isinstance(where.spans, list), "the scripted family runs on a CPU"
    size, found = where.kv.block_tokens, {}
    for group in where.spans:
        firsts = range(group.tokens.start, group.tokens.start + 1) if isinstance(group.tokens, slice) else None
        for number, i in enumerate(firsts or group.tokens.tolist()):
            if not positions[i]:
                continue
            at = positions[i] - 1
            if isinstance(group, RowGroup) and group.gathered is None:
                found[i] = int(group.slots[number, at])
            else:
                page = _pages(group)[number, at // size]
                found[i] = int(page) * size + at % size
    return found


def _pages(group: SpanGroup | RowGroup) -> Tensor:
    """Return the pages of K of each span, [spans, blocks]."""
    if isinstance(group, RowGroup):
        assert group.gathered is not None
        return group.gathered.view(2, len(group.tokens), -1)[0]
    return group.pages.view(2, group.num_spans, -1)[0]


def _read(where: GroupInputs, slot: int) -> ScriptState:
    size = where.kv.block_tokens
    page = kv_read(where.kv.pages(0)[1:], torch.tensor([slot // size]), _WIDTH, torch.float32)
    return ScriptState.of(page[0, slot % size].round().long().tolist())
