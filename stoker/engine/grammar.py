"""The engine's side of structured output: a matcher a row. Who makes matchers, and from what, is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from stoker.base.errors import InvalidRequest
from stoker.sched.request import GrammarSpec


class Matcher(Protocol):
    @property
    def done(self) -> bool:
        """The output is complete, nothing may follow."""

    @property
    def too_slow(self) -> bool:
        """It holds up every other row: better that its own answer ends."""

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False if the grammar has no such way."""

    def fill(self, allowed: Tensor) -> None:
        """Which tokens may come next, into [ceil(vocab / 32)] int32, a bit a token, lowest first."""


class Grammars(Protocol):
    def prepare(self, spec: GrammarSpec) -> object:
        """The slow part, done on another thread before the request is added. InvalidRequest if `spec` is not a grammar. While
        somebody keeps what it returns, matchers are quick to make."""

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int) -> Matcher:
        """A matcher that has gone through `token_ids`; quick once prepared. It will be given `max_tokens` in all, and should
        be done by then: an answer that is cut off is of no use."""


class NoGrammars:
    """For engines that nobody gave a vocabulary."""

    def prepare(self, spec: GrammarSpec) -> object:
        raise InvalidRequest(f"this engine has no grammars, so no {spec.kind}", code="invalid_grammar")

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int) -> Matcher:
        raise InvalidRequest(f"this engine has no grammars, so no {spec.kind}", code="invalid_grammar")
