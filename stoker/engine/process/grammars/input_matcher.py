"""InputMatcher: an output whose structure follows one grammar, and the inputs of its custom tool calls another.

The outer matcher allows any text where the input of a custom tool stands. While the output is inside that text, only tokens are
allowed that the input's own grammar allows too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from stoker.engine.process.grammars.input_text import InputText
from stoker.engine.process.grammars.matcher import MARGIN, MAX_TOKEN_S, XGrammarMatcher
from stoker.engine.process.grammars.text_grammars import PreparedInput

_MAX_GAP = 64  # bytes between the begin of a call and the opening of its input: a number and marks


class InputMatcher:
    """Follows one row's output. `inputs` are the grammars of the custom tools that it may call."""

    def __init__(
        self,
        outer: XGrammarMatcher,
        inputs: Sequence[PreparedInput],
        text_of: Callable[[int], bytes],
        max_tokens: int | None,
    ) -> None:
        self._outer = outer
        self._inputs = inputs
        self._text_of = text_of
        self._tail = b""  # the end of the output, as far as it may be the begin or the opening of an input
        self._max_tail = max(len(one.begin) for one in inputs) + 256
        self._begun: PreparedInput | None = None  # its opening has not been written
        self._inside: InputText | None = None
        self._tokens_left = max_tokens
        self._ending: list[int] | None = None  # from the current token on, while inside an input
        self._ending_tokens: int | None = None  # of the ending that was found last
        self._search_at = -1
        self._spent_s = 0.0
        self.broken = False

    @property
    def done(self) -> bool:
        return self._outer.done

    @property
    def too_slow(self) -> bool:
        return self.broken or self._outer.too_slow

    def accept(self, token_id: int) -> bool:
        started_s = time.thread_time()
        if not self._outer.accept(token_id):
            return False
        if self._tokens_left is not None:
            self._tokens_left -= 1
        if self._inside is None:
            self._watch(self._text_of(token_id))
        elif not self._inside.accept(token_id):
            self.broken = self._inside.broken
            return self.broken  # a grammar that reached a limit ends with an error of its own
        elif (rest := self._inside.rest) is not None:
            self._inside = self._ending = None
            self._outer.complete_in_time()
            self._watch(rest)
        elif self._ending is not None and self._ending[0] == token_id:
            self._ending = self._ending[1:] or None
        else:
            self._ending = None
            self._search_in_time()
        self.broken |= self._spent_s + time.thread_time() - started_s > MAX_TOKEN_S
        self._spent_s = 0.0
        return True

    def fill(self, allowed: Tensor) -> None:
        if self._inside is None:
            self._outer.fill(allowed)
            if self._begun is not None:
                rest = _rest_of(self._begun.opening, self._tail)
                allowed.numpy()[:] &= ~self._begun.text.vocabulary.crossing(rest)
            return
        self._outer.fill_by_grammar(allowed)
        started_s = time.thread_time()
        mask = allowed.numpy()
        mask &= self._inside.allowed()
        self._spent_s += time.thread_time() - started_s
        if self._inside.broken or not mask.any():  # the text needs what the format cannot write, such as its end mark
            self.broken = True
        elif self._must_end():
            assert self._ending is not None
            token_id = self._ending[0]
            mask[:] = 0
            mask.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def forced(self, max_tokens: int) -> list[int]:
        if self._inside is None:
            return self._outer.forced(max_tokens)
        if self._must_end():
            assert self._ending is not None
            return self._ending[:max_tokens]
        return self._inside.forced()[:max_tokens]

    def _must_end(self) -> bool:
        if self._ending is None or self._tokens_left is None:
            return False
        return self._tokens_left - len(self._ending) <= MARGIN

    def _watch(self, text: bytes) -> None:
        """Find the begin and then the opening of an input in the text outside of inputs."""
        self._tail = (self._tail + text)[-self._max_tail :]
        if self._begun is None or len(self._tail) > _MAX_GAP + len(self._begun.opening):
            self._begun = None
            at, found = max((self._tail.rfind(one.begin), i) for i, one in enumerate(self._inputs))
            if at < 0:
                return
            self._begun = self._inputs[found]
            self._tail = self._tail[at + len(self._begun.begin) :]
        begun = self._begun
        opened = self._tail.find(begun.opening)
        if opened < 0:
            return
        # `fill` forbids tokens that cross the opening's end, so that only tokens of a forged resume do.
        self.broken |= opened + len(begun.opening) < len(self._tail)
        self._begun, self._tail = None, b""
        if begun.is_string and self._outer.allows_newline():
            return  # free text that looks like a call
        self._inside, self._ending_tokens = begun.text.matcher(), None
        self._search_at = self._tokens_left if self._tokens_left is not None else -1
        self._search_in_time()

    def _search_in_time(self) -> None:
        """Search an ending if few tokens are left. The closer the limit, the more often."""
        if self._inside is None or self._tokens_left is None or self._tokens_left > self._search_at:
            return
        tokens = self._inside.ending()
        self._ending = None if tokens is None else self._outer.ending_after(tokens)
        if self._ending is not None:
            self._ending_tokens = len(self._ending)
        if self._ending_tokens is None:
            self._search_at = self._tokens_left // 2
        else:  # none was found now, for example inside of a character: the last one says how long one is
            self._search_at = self._tokens_left - max(1, (self._tokens_left - self._ending_tokens - MARGIN) // 4)


def _rest_of(opening: bytes, written: bytes) -> bytes:
    """Return what is left of an opening of which some may be written."""
    return opening[max(n for n in range(len(opening)) if written.endswith(opening[:n])) :]
