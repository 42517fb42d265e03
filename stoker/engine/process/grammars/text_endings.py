"""Find a short text that completes a partial one, with a byte-level matcher of llguidance.

The search follows forced text for free and branches where the grammar has a choice, at most a few times. Its effort is counted
in states, never in seconds: an answer must not depend on timing.
"""

from __future__ import annotations

import llguidance
import numpy as np

_MAX_STATES = 2_000
_MAX_CHOICES = 6  # on the way to the ending; after that, the preferred bytes are taken one after the other
_MAX_BYTES = 2_048
_FEW = 24  # with more possible bytes than this, the text is free: only some preferred bytes are tried
_MAX_PREFERRED = 3
_PREFERRED = b"\n\")]}>;'`0a A_"
_END_ID = 256


def shortest_ending(matcher: llguidance.LLMatcher) -> bytes | None:
    """Return a text after which the grammar accepts, or None if the search did not find one."""
    search = _Search()
    for num_choices in range(_MAX_CHOICES + 1):
        found = search.branch(matcher.deep_copy(), num_choices)
        if found is not None:
            return found
        if search.states_left <= 0:
            break
    return search.straight(matcher.deep_copy())


class _Search:
    def __init__(self) -> None:
        self.states_left = _MAX_STATES
        self._mask = np.zeros(-(-(_END_ID + 1) // 32), dtype=np.int32)

    def branch(self, matcher: llguidance.LLMatcher, num_choices: int) -> bytes | None:
        """Search with at most `num_choices` choices. Changes the matcher."""
        self.states_left -= 1
        if self.states_left < 0:
            return None
        if matcher.is_accepting():
            return b""
        forced = _forced(matcher)
        if forced is None:
            return None
        if matcher.is_accepting():
            return forced
        if num_choices == 0:
            return None
        for byte in self._candidates(matcher):
            ahead = matcher.deep_copy()
            if not ahead.consume_token(byte):
                continue
            found = self.branch(ahead, num_choices - 1)
            if found is not None:
                return forced + bytes([byte]) + found
        return None

    def straight(self, matcher: llguidance.LLMatcher) -> bytes | None:
        """Take the preferred byte at every choice. Changes the matcher."""
        written = b""
        while len(written) < _MAX_BYTES:
            if matcher.is_accepting():
                return written
            forced = _forced(matcher)
            if forced is None:
                return None
            written += forced
            if matcher.is_accepting():
                return written
            candidates = self._candidates(matcher)
            if not candidates or not matcher.consume_token(candidates[0]):
                return None
            written += bytes([candidates[0]])
        return None

    def _candidates(self, matcher: llguidance.LLMatcher) -> list[int]:
        if matcher.is_stopped():
            return []
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[:_END_ID]
        preferred = [byte for byte in _PREFERRED if bits[byte]]
        if int(bits.sum()) > _FEW and preferred:
            return preferred[:_MAX_PREFERRED]
        others = [int(byte) for byte in np.flatnonzero(bits)[:_FEW] if byte not in preferred]
        return preferred + others


def _forced(matcher: llguidance.LLMatcher) -> bytes | None:
    """Take the forced text, and return it. None: it is too long, or the matcher reached a limit."""
    forced = b"" if matcher.is_stopped() else bytes(matcher.compute_ff_bytes())
    if len(forced) > _MAX_BYTES or (forced and not matcher.consume_tokens(list(forced))) or matcher.is_error():
        return None
    return forced
