"""ForcedText: the tokens that a grammar forces next, as the model would most likely write them.

A grammar forces text, and most texts can be written in several tokens or in others. The tokenizer's own way is the one
that the model was trained on. The result is a guess: it is verified like every other draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from stoker.engine.process.grammars.endings import EndingSearch, Mask
from stoker.engine.process.grammars.xgrammar_import import xgrammar

_MAX_SEARCH_S = 0.002  # CPU seconds of the engine's thread; the search then ends with what it has


class ForcedText:
    """Finds forced text in one vocabulary."""

    def __init__(self, endings: EndingSearch, encode: Callable[[str], list[int]]) -> None:
        self._endings = endings
        self._encode = encode

    def find(self, matcher: xgrammar.GrammarMatcher, max_tokens: int) -> list[int]:
        """Return tokens that must come next, at most `max_tokens`. The matcher's state does not change."""
        until_s = time.thread_time() + _MAX_SEARCH_S
        mask = np.zeros(len(self._endings.non_openers), dtype=np.int32)
        forced: list[int] = []
        ahead = matcher
        while len(forced) < max_tokens and not ahead.is_terminated():
            ahead.fill_next_token_bitmask(mask[None])
            token_id = self._endings.forced(mask)
            if token_id is None:
                token_id = _only_token(mask)
            if token_id is None:
                break
            if ahead is matcher:
                ahead = matcher.fork()
            if not ahead.accept_token(token_id):
                break
            forced.append(token_id)
            if time.thread_time() > until_s:
                break
        return self._as_the_tokenizer_writes(forced)[:max_tokens]

    def _as_the_tokenizer_writes(self, token_ids: list[int]) -> list[int]:
        """Return the tokenizer's own tokens for the text of `token_ids`, or `token_ids` if they do not give that text."""
        texts = [self._endings.text_of(token_id) for token_id in token_ids]
        num_texts = next((i for i, text in enumerate(texts) if not text), len(texts))  # a stop token has no text
        forced = b"".join(texts[:num_texts])
        try:
            encoded = self._encode(forced.decode())
        except UnicodeDecodeError:  # it was cut within a character
            return token_ids
        if b"".join(map(self._endings.text_of, encoded)) != forced:
            return token_ids
        return encoded + token_ids[num_texts:]


def _only_token(mask: Mask) -> int | None:
    """Return the token that a mask allows if it allows no other."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None
