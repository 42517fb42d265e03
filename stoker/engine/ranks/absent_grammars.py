"""Grammars on a rank that does not sample with them: the first rank does, and the others get its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stoker.sched.request import GrammarSpec


class AbsentMatcher:
    """Marks a row as one that the first rank samples."""

    done = False
    too_slow = False

    def accept(self, token_id: int) -> bool:
        return True

    def fill(self, allowed: Tensor) -> None:
        raise AssertionError("only the first rank samples with a grammar")

    def forced(self, max_tokens: int) -> list[int]:
        return []


class AbsentGrammars:
    def prepare(self, spec: GrammarSpec) -> object:
        return None

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int) -> AbsentMatcher:
        return AbsentMatcher()

    def forced_start(self, spec: GrammarSpec) -> Sequence[int]:
        return ()
