"""XGrammarMatcher: follows one row's output through a compiled grammar, and completes it within the row's token limit.

When few tokens are left, the matcher forbids tokens that start new elements. At the last moment it forces the shortest
ending that was found.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.engine.process.grammars.endings import EndingSearch, EndingTooSlow
from stoker.engine.process.grammars.forced_text import ForcedText
from stoker.engine.process.grammars.text_grammars import PreparedInput
from stoker.engine.process.grammars.white_space_style import WhiteSpaceStyle
from stoker.engine.process.grammars.xgrammar_import import xgrammar

MAX_TOKEN_S = 0.5  # CPU seconds to match one token; a slower grammar would stall all rows, and ends with an error
MARGIN = 6  # tokens by which a token that opens nothing may lengthen the ending


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PreparedGrammar:
    """A compiled grammar, with what matchers need to complete their output in time."""

    grammar: xgrammar.CompiledGrammar
    endings: EndingSearch
    forced_text: ForcedText
    first_ending: int | None  # tokens of the shortest whole output that was found
    reserve: int  # from this many tokens before the last possible moment on, no new element is started
    num_bytes: int
    allows_text: bool = False  # the output may be free text, which the token limit may cut
    inputs: tuple[PreparedInput, ...] = ()  # of the custom tools that the output may call
    forced_start: tuple[int, ...] = ()  # tokens that an output most likely begins with, because nothing else may


class XGrammarMatcher:
    """`max_tokens` is the limit of the output, the stop token included. None: the output may be cut off."""

    def __init__(self, prepared: PreparedGrammar, max_tokens: int | None = None) -> None:
        self._matcher = xgrammar.GrammarMatcher(prepared.grammar)
        self._endings = prepared.endings
        self._forced_text = prepared.forced_text
        self._forced: list[int] = []  # what is left of the forced tokens that were found last
        self._last_token_id: int | None = None
        self._style = WhiteSpaceStyle()
        self._tokens_left = sys.maxsize if max_tokens is None else max_tokens
        self._ending: list[int] | None = None  # from the current token on; None: not searched at this token
        # An ending is searched when this many tokens are left. The closer the limit, the more often.
        self._search_at = -1
        self._reserve = 0
        self._shortest_forced = 2 if prepared.allows_text else 1  # free text that could end here need not end
        self._matching_s = 0.0  # since the last accepted token
        self.too_slow = False
        if max_tokens is not None and prepared.first_ending is not None:
            self._reserve = MARGIN + min(prepared.reserve, max_tokens // 4)
            self._search_at = self._next_search(prepared.first_ending)
            if self._tokens_left <= self._search_at:
                self._search()

    @property
    def done(self) -> bool:
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        started_s = time.thread_time()
        if not self._matcher.accept_token(token_id):
            return False
        self.too_slow |= self._matching_s + time.thread_time() - started_s > MAX_TOKEN_S
        self._matching_s = 0.0
        self._tokens_left -= 1
        self._last_token_id = token_id
        self._style.read(self._forced_text.text_of(token_id))
        self._forced = self._forced[1:] if self._forced and self._forced[0] == token_id else []
        if self._ending is not None and self._ending[0] == token_id:
            self._ending = self._ending[1:] or None
        else:
            self._ending = None
            if self._tokens_left <= self._search_at and not self.done:
                self._search()
        return True

    def fill_by_grammar(self, allowed: Tensor) -> None:
        """Like `fill`, but whatever the token limit."""
        started_s = time.thread_time()
        self._matcher.fill_next_token_bitmask(allowed[None])
        self._matching_s += time.thread_time() - started_s

    def allows_newline(self) -> bool:
        """Return True if a line may end here: in free text, but not in a JSON string."""
        newline_id = self._endings.id_of(b"\n")
        if newline_id is None:
            return False
        allowed = torch.zeros(len(self._endings.non_openers), dtype=torch.int32)
        self.fill_by_grammar(allowed)
        return bool(allowed[newline_id >> 5] >> (newline_id & 31) & 1)

    def complete_in_time(self) -> None:
        """Search endings from here on. None was found from the start if the output has text that only a mark ends."""
        if self._tokens_left < sys.maxsize and self._search_at < 0 and not self.done:
            self._reserve = MARGIN
            self._search()

    def ending_after(self, token_ids: list[int]) -> list[int] | None:
        """Return tokens that begin with `token_ids` and complete the output, or None if none were found."""
        ahead = self._matcher.fork()
        if not all(ahead.accept_token(token_id) for token_id in token_ids):
            return None
        try:
            ending = self._endings.find(ahead)
        except EndingTooSlow:
            self.too_slow = True
            return None
        return None if ending is None else token_ids + ending

    def fill(self, allowed: Tensor) -> None:
        self.fill_by_grammar(allowed)
        if self._ending is None or len(self._ending) < self._shortest_forced:
            return
        if (spare := self._tokens_left - len(self._ending)) > self._reserve:
            return
        mask = allowed.numpy()
        if spare > MARGIN:
            mask &= self._endings.non_openers
        else:
            mask[:] = 0
        token_id = self._ending[0]
        mask.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def forced(self, max_tokens: int) -> list[int]:
        ending = self._ending
        if ending is not None and len(ending) >= self._shortest_forced and self._tokens_left - len(ending) <= MARGIN:
            return ending[:max_tokens]  # `fill` allows nothing else
        if not self._forced and not self.done:
            self._forced = self._forced_text.find(self._matcher, self._last_token_id, self._style, max_tokens)
        return self._forced[:max_tokens]

    def _search(self) -> None:
        try:
            self._ending = self._endings.find(self._matcher)
        except EndingTooSlow:
            self.too_slow = True
        self._search_at = self._next_search(len(self._ending)) if self._ending is not None else self._tokens_left // 2

    def _next_search(self, ending: int) -> int:
        spare = self._tokens_left - ending - self._reserve
        return self._tokens_left - max(1, spare // 4)
