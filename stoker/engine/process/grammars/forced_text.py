"""ForcedText: the tokens that a grammar forces next, as the model would most likely write them.

A grammar forces text, and most texts can be written in several tokens or in others. The tokenizer's own way is the one
that the model was trained on. Grammars of tool calls also allow any white space between the parts of a JSON value; the
style of the output so far is continued (white_space_style.py). The result is a guess: it is verified like every other
draft.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from stoker.engine.process.grammars.endings import EndingSearch, Mask
from stoker.engine.process.grammars.white_space_style import WhiteSpaceStyle
from stoker.engine.process.grammars.xgrammar_import import xgrammar

_WHITE_SPACE = b" \t\n\r"
_SEPARATORS = b":,"
_FIRST_CLOSER = re.compile(rb"\n[ \t]*[}\]]")  # on a line of its own
_MAX_SEARCH_S = 0.002  # CPU seconds of the engine's thread; the search then ends with what it has


class ForcedText:
    """Finds forced text in one vocabulary."""

    def __init__(self, endings: EndingSearch, encode: Callable[[str], list[int]]) -> None:
        self._endings = endings
        self._encode = encode
        is_text = [endings.text_of(i)[:1] not in _WHITE_SPACE for i in range(32 * len(endings.non_openers))]
        self._no_space: Mask = np.packbits(is_text, bitorder="little").view(np.int32)  # bit masks of all other tokens

    def find(
        self, matcher: xgrammar.GrammarMatcher, last_token_id: int | None, style: WhiteSpaceStyle, max_tokens: int
    ) -> list[int]:
        """Return tokens that must come next, at most `max_tokens`. The matcher's state does not change.

        `last_token_id` is the last token of the output, `style` its white space.
        """
        until_s = time.thread_time() + _MAX_SEARCH_S
        mask = np.zeros(len(self._endings.non_openers), dtype=np.int32)
        forced: list[int] = []
        sampled = last = b"" if last_token_id is None else self._endings.text_of(last_token_id)
        ahead = matcher
        while len(forced) < max_tokens and not ahead.is_terminated():
            ahead.fill_next_token_bitmask(mask[None])
            token_id = self._next(mask, last, style, is_sampled=not forced)
            if token_id is None:
                break
            if ahead is matcher:
                ahead = matcher.fork()
            if not ahead.accept_token(token_id):
                break
            forced.append(token_id)
            last = self._endings.text_of(token_id)
            if time.thread_time() > until_s:
                break
        return self._as_the_model_writes(forced, sampled)[:max_tokens]

    def at_start(self, grammar: xgrammar.CompiledGrammar, max_tokens: int) -> list[int]:
        """Return tokens that every output of a grammar begins with, at most `max_tokens`."""
        return self.find(xgrammar.GrammarMatcher(grammar), None, WhiteSpaceStyle(), max_tokens)

    def text_of(self, token_id: int) -> bytes:
        return self._endings.text_of(token_id)

    def _next(self, mask: Mask, last: bytes, style: WhiteSpaceStyle, *, is_sampled: bool) -> int | None:
        """Return the next token of the forced text, or None at a choice.

        `last` is the text of the token before it. `is_sampled`: the model has written that token.
        """
        token_id = self._endings.forced(mask)
        if token_id is not None:
            return self._up_to_separator(token_id)
        token_id = _only_token(mask)
        if token_id is not None:
            return token_id
        # Is white space the only choice?
        token_id = self._endings.forced(mask & self._no_space)
        if token_id is None:
            return None
        following = self._endings.text_of(token_id)
        if not last or last[-1:] not in _WHITE_SPACE:
            space = style.before(last, following)
        else:
            space = self._rest_of_indent(last, following) if is_sampled else b""
        space_id = self._endings.id_of(space) if space else None
        if space_id is not None and mask[space_id >> 5] >> (space_id & 31) & 1:
            return space_id
        return self._up_to_separator(token_id)

    def _rest_of_indent(self, sampled: bytes, following: bytes) -> bytes:
        """Return the space that the model still writes between the sampled token and `following`, if there is one.

        Many tokenizers put the last space of an indentation into the token after it. An indentation that the tokenizer writes
        only before a space is followed by one.
        """
        if len(sampled) < 2 or sampled.strip(_WHITE_SPACE) or sampled[-1:] != b" ":
            return b""
        is_whole, is_cut = (self._first_token(sampled + rest + following) == sampled for rest in (b"", b" "))
        return b" " if is_cut and not is_whole else b""

    def _first_token(self, text: bytes) -> bytes:
        """Return the text of the first token that the tokenizer writes for `text`."""
        encoded = self._encode(text.decode(errors="ignore"))
        return self._endings.text_of(encoded[0]) if encoded else b""

    def _up_to_separator(self, token_id: int) -> int:
        """Return a token that ends at the first separator of this one.

        A space may follow there, even if no token with this beginning contains one.
        """
        text = self._endings.text_of(token_id)
        end = next((i for i, byte in enumerate(text, 1) if byte in _SEPARATORS), len(text))
        shorter = self._endings.id_of(text[:end])
        return token_id if shorter is None else shorter

    def _as_the_model_writes(self, token_ids: list[int], sampled: bytes) -> list[int]:
        """Return the tokenizer's own tokens for the text of `token_ids`, or `token_ids` if they do not give that text.

        `sampled` is the text before them.
        """
        texts = [self._endings.text_of(token_id) for token_id in token_ids]
        num_texts = next((i for i, text in enumerate(texts) if not text), len(texts))  # a stop token has no text
        forced = b"".join(texts[:num_texts])
        try:
            encoded = [token_id for part in _parts(forced, sampled) for token_id in self._encode(part.decode())]
        except UnicodeDecodeError:  # it was cut within a character
            return token_ids
        if b"".join(map(self._endings.text_of, encoded)) != forced:
            return token_ids
        return encoded + token_ids[num_texts:]


def _parts(forced: bytes, sampled: bytes) -> list[bytes]:
    """Split forced text where models begin a new token, even if the tokenizer has one for the text around it.

    A closing bracket on a line of its own is usually followed by a line break. So models write it as a token of its own,
    also where another one follows.
    """
    ends = [found.end() - len(sampled) for found in _FIRST_CLOSER.finditer(sampled + forced)]
    borders = [0, *(end for end in ends if end > 0), len(forced)]
    return [forced[start:end] for start, end in pairwise(borders)]


def _only_token(mask: Mask) -> int | None:
    """Return the token that a mask allows if it allows no other."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None
