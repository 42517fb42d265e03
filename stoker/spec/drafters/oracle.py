"""An oracle with a given acceptance rate, for benchmarks: `oracle:0.8`.

It remembers the answers of finished sequences. When the same prompt comes again, it proposes the same answer, and makes a
share of the guesses wrong. So the speed at an acceptance rate can be measured without a real drafter.
"""

from __future__ import annotations

from collections import OrderedDict

from stoker.base.errors import ConfigError
from stoker.base.ids import BlockKey
from stoker.sched.sequence import Sequence
from stoker.spec.drafter import DRAFTERS, DrafterParts

_MAX_ANSWERS = 4096
_FACTOR, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


@DRAFTERS.register("oracle")
class OracleDrafter:
    """Proposes known answers. The guess at a position is wrong or right by a hash of prompt and position, the same in every
    run. It differs by prompt, so that the sequences of a batch do not accept the same number of drafts in each step."""

    def __init__(self, parts: DrafterParts) -> None:
        try:
            self._rate = float(parts.argument or "1")
        except ValueError:
            self._rate = -1.0
        if not 0.0 <= self._rate <= 1.0:
            raise ConfigError(f"--drafter oracle:{parts.argument}: the acceptance rate must be a number from 0 to 1")
        self._vocab_size = parts.vocab_size
        # The guesses by prompt and seed. They are made when an answer ends, so that a proposal takes little of a step's time.
        self._guesses: OrderedDict[tuple[BlockKey, int], list[int]] = OrderedDict()

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        guesses = self._guesses.get(_key(seq), [])
        start = len(seq.token_ids) - seq.request.num_prompt
        return guesses[start : start + max_tokens]

    def ended(self, seq: Sequence) -> None:
        if seq.has_output:
            key = _key(seq)
            first = int.from_bytes(key[0][:8], "little")
            answer = seq.token_ids[seq.request.num_prompt :]
            self._guesses[key] = [self._guess(token_id, first + i) for i, token_id in enumerate(answer)]
            if len(self._guesses) > _MAX_ANSWERS:
                self._guesses.popitem(last=False)

    def _guess(self, token_id: int, number: int) -> int:
        """Return the token, or a wrong one that does not end the tape (see DraftTape)."""
        mixed = ((number + 1) * _FACTOR) & _WORD
        mixed = ((mixed ^ (mixed >> 29)) * _FACTOR) & _WORD
        is_right = mixed >> 11 < self._rate * 2.0**53
        return token_id if is_right else ~((token_id + 1) % self._vocab_size)


def _key(seq: Sequence) -> tuple[BlockKey, int]:
    seq.extend_keys()
    return seq.key_up_to(seq.request.num_prompt), seq.request.sampling.seed
