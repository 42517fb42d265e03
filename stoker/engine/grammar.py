"""Structured output as the engine sees it: one Matcher per row. The object that creates matchers is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from stoker.base.errors import InvalidRequest
from stoker.sched.request import GrammarSpec


class Matcher(Protocol):
    """Follows one row's output through its grammar."""

    @property
    def done(self) -> bool:
        """True if the output is complete: no token may follow."""

    @property
    def too_slow(self) -> bool:
        """True if matching takes so long that it delays all other rows. The row then ends with an error."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token. Return False if the grammar does not allow it."""

    def fill(self, allowed: Tensor) -> None:
        """Write which tokens may come next into [ceil(vocab / 32)] int32, one bit per token, lowest bit first."""

    def forced(self, max_tokens: int) -> list[int]:
        """Return the tokens that the grammar most likely forces next, at most `max_tokens`. Often there is none.

        They are drafts, so they need not be right. The state does not change.
        """


class Grammars(Protocol):
    """Compiles grammars and creates matchers."""

    def prepare(self, spec: GrammarSpec) -> object:
        """Compile the grammar. Slow: called on another thread before the request is added.

        Raises InvalidRequest if `spec` cannot be compiled. While the caller keeps the returned object, `matcher` is fast.
        """

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int) -> Matcher:
        """Return a matcher that has accepted `token_ids`. Fast if the grammar is prepared.

        The output has at most `max_tokens` tokens. The matcher should complete it by then, because truncated output is
        useless.
        """

    def forced_start(self, spec: GrammarSpec) -> Sequence[int]:
        """Return the tokens that an output most likely begins with, because the grammar forces them. Often there is none.

        They are drafts. Fast if the grammar is prepared.
        """


class NoGrammars:
    """Rejects every grammar, because the engine has no vocabulary."""

    def prepare(self, spec: GrammarSpec) -> object:
        raise _not_supported(spec)

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int) -> Matcher:
        raise _not_supported(spec)

    def forced_start(self, spec: GrammarSpec) -> Sequence[int]:
        return ()


def _not_supported(spec: GrammarSpec) -> InvalidRequest:
    return InvalidRequest(
        f"this engine does not support grammars, so it cannot enforce {spec.kind}", code="invalid_grammar"
    )
