"""EndingSearch: finds a short sequence of tokens that completes an output.

The search is greedy: its endings are short, but not always the shortest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from stoker.engine.process.grammars.xgrammar_import import xgrammar

_MAX_ENDING = 1024  # tokens; a longer ending is not worth steering to
# CPU seconds of one search. It runs on the engine's thread, which does nothing else meanwhile. An ambiguous regex may take
# minutes. The search then fails instead of returning what it has, because an answer must not depend on timing.
_MAX_SEARCH_S = 5.0
_OPENERS = frozenset(b"{[,")
# Tokens to continue with where nothing can be closed or separated, in this order. Inside a text with a pattern they are used
# in turns: a quote may end the text after any of them, and many patterns only continue after a delimiter.
_SHORT_TEXTS = ('""', "0", '"', "1", "[]", "{}", "@", "-", ".", "true", "null", "false", "[", "{", ">")

Mask = np.ndarray[Any, Any]  # [ceil(vocab / 32)] int32, one bit per token


class EndingTooSlow(Exception):
    """The search takes longer than _MAX_SEARCH_S."""


class EndingSearch:
    """Searches endings in one vocabulary."""

    def __init__(self, vocabulary: Sequence[bytes], vocab_size: int, stop_id: int) -> None:
        self._ids: dict[bytes, int] = {}
        for token_id, text in enumerate(vocabulary):
            if text:
                self._ids.setdefault(text, token_id)
        self._vocabulary = vocabulary
        self._stop_id = stop_id
        self._sorted = sorted(range(len(vocabulary)), key=vocabulary.__getitem__)
        self._ranks = np.zeros(-(-vocab_size // 32) * 32, dtype=np.int32)  # index in _sorted, by token id
        self._ranks[self._sorted] = np.arange(len(vocabulary))
        single = np.array([token_id for text, token_id in self._ids.items() if len(text) == 1], dtype=np.int32)
        self._byte_words, self._byte_bits = single >> 5, np.int32(1) << (single & 31)
        closers = sorted((text for text in self._ids if not text.strip(b'"}]')), key=len, reverse=True)
        self._string_closers = self._known(text for text in closers if text[:1] == b'"' and b'"' not in text[1:])
        self._closers = self._known(text for text in closers if b'"' not in text)
        self._quote = self._known([b'"'])
        self._separators = self._known([b",", b":"])
        self._short_texts = self._known(text.encode() for text in _SHORT_TEXTS)
        self._single = self._known(bytes([byte]) for byte in [*range(0x20, 0x7F), 0x0A, *range(0x80, 0x100)])
        opens = np.array([bool(_OPENERS.intersection(text)) for text in vocabulary], dtype=bool)
        bits = np.ones(-(-vocab_size // 32) * 32, dtype=bool)
        bits[: len(opens)] = ~opens
        self.non_openers: Mask = np.packbits(bits, bitorder="little").view(np.int32)
        """The tokens that start no new element: they contain no comma and no opening bracket."""

    def _known(self, texts: Iterable[bytes]) -> list[int]:
        return [self._ids[text] for text in texts if text in self._ids]

    def text_of(self, token_id: int) -> bytes:
        """Return the text of a token. It is empty for tokens that the grammar must not match as text."""
        return self._vocabulary[token_id] if token_id < len(self._vocabulary) else b""

    def id_of(self, text: bytes) -> int | None:
        """Return the first token with this text."""
        return self._ids.get(text)

    def find(self, matcher: xgrammar.GrammarMatcher) -> list[int] | None:
        """Return tokens that complete the output, ending with a stop token. None if there is no ending.

        Raises EndingTooSlow.
        """
        until_s = time.thread_time() + _MAX_SEARCH_S
        ahead = matcher.fork()
        mask = np.zeros(len(self.non_openers), dtype=np.int32)
        used: Counter[int] = Counter()
        tried: Counter[int] = Counter()  # since the last closing or separating token
        ending: list[int] = []
        while len(ending) < _MAX_ENDING:
            if time.thread_time() > until_s:
                raise EndingTooSlow
            if ahead.is_completed():
                return [*ending, self._stop_id]
            ahead.fill_next_token_bitmask(mask[None])
            token_id = self.forced(mask)
            if token_id is None:
                token_id = self._chosen(mask, used, tried)
            if token_id is None or not ahead.accept_token(token_id):
                return None
            ending.append(token_id)
        return None

    def forced(self, mask: Mask) -> int | None:
        """Return the longest token of the text that must come next, or None if the next byte is a choice.

        xgrammar can return that text, but only all of it: a grammar of a few rules may force more text than fits in memory.
        """
        if np.count_nonzero(mask[self._byte_words] & self._byte_bits) > 1:
            return None
        words = np.flatnonzero(mask)
        bits = np.flatnonzero(np.unpackbits(mask[words].view(np.uint8), bitorder="little"))
        allowed = np.sort(self._ranks[words[bits >> 5] << 5 | bits & 31])
        if not len(allowed):
            return None
        first, last = (self._vocabulary[self._sorted[rank]] for rank in (allowed[0], allowed[-1]))
        for rank in allowed[1:]:
            # Tokens that are prefixes of each other are sorted by length. The first one that does not continue the token
            # before it shows where the allowed tokens diverge.
            if not (text := self._vocabulary[self._sorted[rank]]).startswith(first):
                break
            first = text
        for length in range(min(len(first), len(last)), 0, -1):
            if first[:length] == last[:length] and (token_id := self._ids.get(first[:length])) is not None:
                return token_id
        return None

    def _chosen(self, mask: Mask, used: Counter[int], tried: Counter[int]) -> int | None:
        """Return the allowed token that most likely leads to a short ending: closing, separating, then short ones."""

        def allowed(token_id: int) -> bool:
            return bool(mask[token_id >> 5] >> (token_id & 31) & 1)

        brace, end_brace = self._ids.get(b"{"), self._ids.get(b"}")
        # If both braces are allowed, they are the content of a string.
        in_string = brace is not None and end_brace is not None and allowed(brace) and allowed(end_brace)
        first = self._string_closers if in_string else [*self._closers, *self._separators]
        if not in_string and any(map(allowed, self._separators)):
            first = self._quote + first  # where a separator is allowed, a quote can only end a string
        for token_id in first:
            # A regex may need the same token many times, or may only continue with another one.
            if allowed(token_id) and used[token_id] < 32:
                used[token_id] += 1
                tried.clear()
                return token_id
        candidates = [token_id for token_id in self._short_texts if allowed(token_id) and tried[token_id] < 8]
        if not candidates:
            candidates = [token_id for token_id in self._single if allowed(token_id)]
        if not candidates:
            candidates = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[:1].tolist()
        if not candidates:
            return None
        token_id = min(candidates, key=tried.__getitem__)
        tried[token_id] += 1
        return token_id
