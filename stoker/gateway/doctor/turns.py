"""TurnMemory: the latest request of each conversation, as hashes, to compare the next one with. Pure.

A request is found again by its session, by its first message and by its second one, always within its tenant. So a
conversation is recognised without a session key too, also when its system prompt changes from turn to turn. Most requests continue
the prompt of the turn before: that one is found at once by the key of its last full block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Literal

import msgspec

from stoker.fleet.prefix_index import Key
from stoker.gateway.prefix.prompt_parts import PromptParts

_PER_ANCHOR = 4  # conversations with the same first message, or in the same session
_SAMPLES = 32
_ANCHORED_MESSAGES = 2
_MAX_HASHES = 1_000_000  # all turns together; less than 100 MB
_MAX_NEW_BLOCKS = 512  # added by a request to the one before it; with more, it is found by its messages
_TURN_HASHES = 48  # what a turn costs besides its parts: its samples and the anchors' entries

Relation = Literal["continued", "salted", "changed", "unrelated"]


class SentTurn(msgspec.Struct, eq=False, gc=False):
    """One request of a conversation. This and the next are msgspec structs, because each request creates them."""

    salt: str | None
    session: str | None
    parts: PromptParts | None
    keys: Sequence[Key]  # a sample of its prefix keys, `stride` blocks apart
    stride: int
    num_blocks: int
    num_tokens: int
    answer_tokens: int
    last_key: Key | None  # of its last full block
    size: int  # in hashes
    anchors: Sequence[Hashable] = ()
    num_anchors: int = 0  # under which it is still remembered

    @classmethod
    def of(
        cls,
        salt: str | None,
        session: str | None,
        parts: PromptParts | None,
        keys: Sequence[Key],
        num_tokens: int,
        answer_tokens: int = 0,
    ) -> SentTurn:
        count = len(keys)
        stride = max(1, count // _SAMPLES)
        samples = keys[stride - 1 :: stride]
        size = _TURN_HASHES + (0 if parts is None else parts.size)
        last = keys[-1] if count else None
        return cls(salt, session, parts, samples, stride, count, num_tokens, answer_tokens, last, size)

    def shared_blocks(self, keys: Sequence[Key]) -> int:
        """Return how many leading blocks of `keys` are those of this turn, to within one stride."""
        end = len(self.keys) * self.stride
        if 0 < end <= len(keys) and keys[end - 1] == self.keys[-1]:  # a key follows from those before it
            return end
        count = 0
        for mine, other in zip(self.keys, islice(keys, self.stride - 1, None, self.stride), strict=False):
            if mine != other:
                break
            count += self.stride
        return min(count, len(keys))


class Comparison(msgspec.Struct, frozen=True, gc=False):
    """How a request relates to an earlier one of its conversation. `place` names the part that changed."""

    earlier: SentTurn
    relation: Relation
    place: str = ""


def compare(earlier: SentTurn, turn: SentTurn, keys: Sequence[Key]) -> Comparison:
    """Compare two requests by the hashes of their parts, or without parts by their prefix keys."""
    old, new = earlier.parts, turn.parts
    if old is None and new is None:
        shared = earlier.shared_blocks(keys)
        if shared + earlier.stride > earlier.num_blocks:
            return Comparison(earlier, "continued")
        return Comparison(earlier, "changed" if shared else "unrelated", "prompt")
    if old is None or new is None or old.has_system != new.has_system:
        return Comparison(earlier, "unrelated")
    has_same_tools = old.tools == new.tools
    if has_same_tools and new.messages[: len(old.messages)] == old.messages:
        return Comparison(earlier, "continued" if earlier.salt == turn.salt else "salted")
    if not has_same_tools:
        tool = _first_difference(old.tools, new.tools)
        # Agents also send requests without tools about the same message, for example to give a conversation a title.
        related = 2 * len(set(old.messages).intersection(new.messages)) >= len(old.messages)
        return Comparison(earlier, "changed" if related else "unrelated", f"tool {tool}")
    at = _first_difference(old.messages, new.messages)
    if at == len(new.messages):
        return Comparison(earlier, "continued" if earlier.salt == turn.salt else "salted")  # an earlier turn, repeated
    is_resent = not set(old.messages[at:]).isdisjoint(new.messages[at:])
    is_rewritten = (
        turn.session is not None and turn.session == earlier.session and at + 1 < len(new.messages) and at > 0
    )
    return Comparison(earlier, "changed" if is_resent or is_rewritten else "unrelated", new.name(at))


def _first_difference(old: Sequence[int], new: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


_RANKS: dict[Relation, int] = {"continued": 3, "salted": 2, "changed": 1, "unrelated": 0}


class TurnMemory:
    """The latest turns, found by their anchors. Bounded by `max_hashes`, least recently used first."""

    def __init__(self, max_hashes: int = _MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._num_hashes = 0
        self._anchored: OrderedDict[Hashable, list[SentTurn]] = OrderedDict()
        self._ends: dict[Key, tuple[str, str, SentTurn]] = {}  # by the last full block: tenant, model and turn

    @property
    def num_hashes(self) -> int:
        return self._num_hashes

    def before(self, tenant: str, model: str, keys: Sequence[Key]) -> SentTurn | None:
        """Return the turn whose full blocks these keys continue, or None. Of several, return the longest."""
        ends = self._ends
        for key in islice(reversed(keys), _MAX_NEW_BLOCKS):
            if key in ends:
                its_tenant, its_model, turn = ends[key]
                return turn if its_tenant == tenant and its_model == model else None
        return None

    def replace(
        self, tenant: str, model: str, turn: SentTurn, keys: Sequence[Key], likely: SentTurn | None = None
    ) -> Comparison | None:
        """Store the turn in place of the one that it continues. Return how it relates to the most similar earlier turn.

        `likely` is what `before` returned. If the turn continues it, no other one is compared.
        """
        best = None if likely is None else _continued((likely,), turn)
        if best is not None and _has_same_anchors(best.earlier, turn):
            before: SentTurn | None = best.earlier
            turn.anchors = best.earlier.anchors
            self._put_in_place(turn, best.earlier)
        else:
            turn.anchors = _anchors(tenant, model, turn)
            if best is None:
                candidates = [one for anchor in turn.anchors for one in self._anchored.get(anchor, ())]
                best = _continued(candidates, turn) or _closest(dict.fromkeys(candidates), turn, keys)
            before = None if best is None or best.relation == "unrelated" else best.earlier
            for anchor in turn.anchors:
                self._put(anchor, turn, before)
        if turn.num_anchors and turn.last_key is not None:
            self._ends[turn.last_key] = tenant, model, turn
        while self._num_hashes > self._max_hashes and self._anchored:
            _, dropped = self._anchored.popitem(last=False)
            for one in dropped:
                self._dropped(one)
        return None if before is None else best

    def _put_in_place(self, turn: SentTurn, before: SentTurn) -> None:
        """Store a turn in place of the one that it continues, under the anchors that still have that one."""
        for anchor in turn.anchors:
            turns = self._anchored.get(anchor)
            if turns is not None and before in turns:
                self._anchored.move_to_end(anchor)
                turns[turns.index(before)] = turn
                self._added(turn)
                self._dropped(before)

    def _put(self, anchor: Hashable, turn: SentTurn, before: SentTurn | None) -> None:
        turns = self._anchored.get(anchor)
        if turns is None:
            self._anchored[anchor] = [turn]
        else:
            self._anchored.move_to_end(anchor)
            if before is not None and before in turns:
                turns.remove(before)
                self._dropped(before)
            elif len(turns) >= _PER_ANCHOR:
                self._dropped(turns.pop(0))  # other anchors may still have it
            turns.append(turn)
        self._added(turn)

    def _added(self, turn: SentTurn) -> None:
        turn.num_anchors += 1
        self._num_hashes += turn.size

    def _dropped(self, turn: SentTurn) -> None:
        """Note that an anchor has dropped the turn."""
        turn.num_anchors -= 1
        self._num_hashes -= turn.size
        key = turn.last_key
        if not turn.num_anchors and key is not None and (end := self._ends.get(key)) is not None and end[2] is turn:
            del self._ends[key]


def _continued(candidates: Iterable[SentTurn], turn: SentTurn) -> Comparison | None:
    """Return the comparison with the longest earlier turn that continues as it was. Most requests have one."""
    new, best, most = turn.parts, None, 0
    if new is None:
        return None
    for one in candidates:
        old = one.parts
        if old is None or len(old.messages) <= most:
            continue
        count = min(len(old.messages), len(new.messages))
        if (
            count
            and old.messages[count - 1] == new.messages[count - 1]  # decides at once for most other conversations
            and old.messages[:count] == new.messages[:count]
            and old.tools == new.tools
            and old.has_system == new.has_system
            and one.salt == turn.salt
        ):
            best, most = one, len(old.messages)
    return None if best is None else Comparison(best, "continued")


def _closest(candidates: Iterable[SentTurn], turn: SentTurn, keys: Sequence[Key]) -> Comparison | None:
    best: Comparison | None = None
    for one in candidates:
        found = compare(one, turn, keys)
        if best is None or _closeness(found, turn) > _closeness(best, turn):
            best = found
    return best


def _closeness(found: Comparison, turn: SentTurn) -> tuple[int, int]:
    old, new = found.earlier.parts, turn.parts
    if old is None or new is None:
        return _RANKS[found.relation], 0
    if found.relation == "continued":
        return _RANKS["continued"], len(old.messages)
    return _RANKS[found.relation], len(set(old.messages).intersection(new.messages))


def _has_same_anchors(before: SentTurn, turn: SentTurn) -> bool:
    """Return True if a turn that continues another one has the same anchors."""
    old = before.parts
    return before.session == turn.session and old is not None and len(old.messages) >= _ANCHORED_MESSAGES


def _anchors(tenant: str, model: str, turn: SentTurn) -> list[Hashable]:
    anchors: list[Hashable] = []
    if turn.session is not None:
        anchors.append((turn.session, model))
    if turn.parts is not None:
        anchors += [(tenant, model, i, one) for i, one in enumerate(turn.parts.messages[:_ANCHORED_MESSAGES])]
    return anchors
