"""CacheDoctor: explains, for each finished request, why its uncached prompt tokens were computed.

The prompt is cut into ranges, from its first token on: what the chosen worker held, what other workers held, what workers have
lost, and what was never sent before. The last one is compared with the previous turn of the conversation. What the worker
reports as cached is then taken away from the front. So the parts always add up to the uncached tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stoker.fleet.lost_blocks import BlockLoss, LossCause, LostBlocks
from stoker.fleet.prefix_index import Key, Match
from stoker.gateway.api.client_body import RequestEnvelope
from stoker.gateway.doctor import miss_parts as why
from stoker.gateway.doctor.miss_parts import Cut, MissPart, split
from stoker.gateway.doctor.turns import Comparison, SentTurn, TurnMemory
from stoker.gateway.prefix.prompt_parts import prompt_parts
from stoker.gateway.prefix.stable_json import StableJson
from stoker.routing.query import Route, RouteQuery

_REASONS: dict[LossCause, str] = {
    "evicted": why.EVICTED,
    "restarted": why.RESTARTED,
    "left": why.RESTARTED,
    "not_stored": why.NOT_STORED,
    "forgotten": why.UNKNOWN,
}
_END = float("inf")
_NO_MATCH = Match()
_AFTER_ROUTING = "after routing"
_OPTIONS = "options"  # such as `chat_template_kwargs`, which no hash of a part contains


class CacheDoctor:
    """Explains the misses of one gateway. It keeps hashes only, in bounded memory."""

    def __init__(self, losses: LostBlocks, stable: StableJson | None = None, turns: TurnMemory | None = None) -> None:
        self._losses = losses
        self._stable = stable or StableJson()
        self._turns = turns or TurnMemory()

    def examine(
        self,
        tenant: str,
        envelope: RequestEnvelope,
        query: RouteQuery,
        route: Route | None,
        prompt_tokens: int,
        answer_tokens: int,
    ) -> ExaminedPrompt:
        """Compare a request with the previous turn. Call it once for each request: it remembers the request."""
        keys, block_tokens = query.keys, query.block_tokens
        if not keys:
            return _SHORT if query.num_tokens <= block_tokens else _UNKNOWN
        turns = self._turns
        likely = turns.before(tenant, query.model, keys)
        parts = prompt_parts(envelope, self._stable, None if likely is None else likely.parts)
        turn = SentTurn.of(envelope.salt, query.session, parts, keys, prompt_tokens, answer_tokens)
        found = turns.replace(tenant, query.model, turn, keys, likely)
        if route is None or envelope.num_prompts > 1:
            return _UNKNOWN
        # Without a tokenizer, the gateway's tokens are an estimate.
        block = block_tokens * (prompt_tokens / max(1, query.num_tokens))
        lost = self._losses.run_of(keys, route.matches.most_blocks, route.routed_s)
        return PromptHistory(route, keys, block, lost, turn, found)


class SimplePrompt(msgspec.Struct, eq=False, gc=False):
    """A prompt about which there is one thing to say, or nothing."""

    cuts: tuple[Cut, ...]

    def parts(self, prompt_tokens: int, cached_tokens: int) -> tuple[MissPart, ...]:
        return split(self.cuts, cached_tokens, prompt_tokens)


_SHORT = SimplePrompt(((_END, why.PARTIAL_BLOCK, ""),))
_UNKNOWN = SimplePrompt(())


class PromptHistory(msgspec.Struct, eq=False, gc=False):
    """A prompt of at least one block, and what was known of its blocks. `block` is the size of a block in tokens."""

    route: Route
    keys: Sequence[Key]
    block: float
    lost: list[tuple[int, BlockLoss]]  # blocks behind those that the workers held
    turn: SentTurn
    found: Comparison | None

    def parts(self, prompt_tokens: int, cached_tokens: int) -> tuple[MissPart, ...]:
        """Return why the tokens that were not cached were computed."""
        return split(self._cuts(cached_tokens), cached_tokens, prompt_tokens)

    def _cuts(self, cached_tokens: int) -> list[Cut]:
        """Return the ranges of the prompt, those below `cached_tokens` only if they are needed for later ones."""
        block, route, lost = self.block, self.route, self.lost
        full = (self.turn.num_tokens - 1) // block * block  # at least the last token is always computed
        cuts: list[Cut] = []
        num_held = route.matches.most_blocks
        if cached_tokens < min(num_held * block, full):
            cuts += [(min(held * block, full), reason, place) for held, reason, place in _held(route)]
        for number, loss in lost:
            cuts.append((min(number * block, full), *_reason(loss, route.routed_s)))
        known = (lost[-1][0] if lost else num_held) * block
        for end, reason, place in _never_sent(self.turn, self.found, self.keys, block, has_known_start=known > 0):
            if end > known:
                cuts.append((min(end, full), reason, place))
                if end >= full:
                    break
        cuts.append((_END, why.PARTIAL_BLOCK, ""))
        return cuts


ExaminedPrompt = SimplePrompt | PromptHistory


def _held(route: Route) -> list[tuple[int, str, str]]:
    """Return what the workers held when the route was chosen: an end in blocks, and why the blocks before it were computed."""
    leg = route.prefill or route.decode
    chosen = route.matches.get(leg.worker.worker_id) or _NO_MATCH
    held = [
        (leg.confirmed_blocks, why.EVICTED, _AFTER_ROUTING),
        (chosen.device_blocks, why.PENDING, ""),
        (chosen.blocks, why.NOT_LOADED, ""),
    ]
    most = route.matches.most_blocks
    if most > chosen.blocks:
        candidates = {reason.worker_id for reason in route.reasons}
        usable = [match.blocks for worker_id, match in route.matches.items() if worker_id in candidates]
        held += [(max(usable, default=0), why.ROUTED_FOR_LOAD, ""), (most, why.HELD_ELSEWHERE, "")]
    return held


def _reason(loss: BlockLoss, now: float) -> tuple[str, str]:
    reason = _REASONS[loss.cause]
    return reason, "" if reason is why.UNKNOWN else why.age(now - loss.at_s)


def _never_sent(
    turn: SentTurn, found: Comparison | None, keys: Sequence[Key], block: float, *, has_known_start: bool
) -> Iterator[Cut]:
    """Yield the reasons for blocks that no worker is known to have had, in tokens."""
    if found is None:
        # A prompt without messages has no conversation. It continues what was sent before if its start is known.
        yield _END, why.NEW if turn.parts is None and has_known_start else why.FIRST_TURN, ""
        return
    earlier = found.earlier
    sent = earlier.num_blocks * block
    if found.relation == "salted":
        yield sent, why.SALTED, ""
    elif found.relation == "changed":
        yield sent, why.CHANGED, found.place
    else:
        shared = earlier.shared_blocks(keys)
        if shared + 2 * earlier.stride < min(earlier.num_blocks, len(keys)):
            yield sent, why.CHANGED, _OPTIONS
        else:
            yield min(shared, earlier.num_blocks) * block, why.EVICTED, ""
        answered = earlier.num_tokens + earlier.answer_tokens
        yield (answered - 1) // block * block, why.ANSWER_CHANGED, ""
        yield answered, why.PARTIAL_BLOCK, ""
    yield _END, why.NEW, ""
