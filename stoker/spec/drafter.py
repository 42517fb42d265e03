"""The registry of tape drafters, and the one place where guesses are checked.

A drafter guesses on the host which tokens may follow a sequence. A wrong guess costs time and never changes an answer,
so a drafter may guess anything. What is not a token of the vocabulary is removed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Protocol

from stoker.base.errors import ConfigError
from stoker.base.registry import Registry
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.drafting import TapeDrafter
from stoker.sched.request import GrammarSpec
from stoker.sched.sequence import Sequence
from stoker.spec.stored_blocks import StoredBlocks


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What a drafter is built from. `argument` is the text after the colon of `--drafter NAME:ARGUMENT`."""

    pool: BlockPool
    vocab_size: int
    argument: str = ""
    stored: StoredBlocks = field(default_factory=lambda: StoredBlocks(0))  # what the tiers hold; empty without tiers
    forced_start: Callable[[GrammarSpec], Tokens[int]] = (
        lambda spec: ()
    )  # what a grammar forces at the start of an output

    def refuse_argument(self, drafter: str) -> None:
        """Raise ConfigError if there is an argument. For drafters without settings."""
        if self.argument:
            raise ConfigError(
                f"--drafter {drafter}:{self.argument}: {drafter!r} takes no argument; write --drafter {drafter}"
            )


class DrafterMaker(Protocol):
    """Creates a drafter. A drafter class with a constructor of this signature is one."""

    def __call__(self, parts: DrafterParts) -> TapeDrafter: ...


DRAFTERS: Registry[DrafterMaker] = Registry("drafter", "stoker.spec.drafters")


def build_drafter(name: str, parts: DrafterParts) -> TapeDrafter:
    """Return the drafter of this name, with its guesses checked. Raises ConfigError."""
    return CheckedDrafter(DRAFTERS.get(name)(parts), parts.vocab_size)


class CheckedDrafter:
    """Passes on the guesses of another drafter as far as they can be computed."""

    def __init__(self, drafter: TapeDrafter, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        if max_tokens <= 0:
            return []
        return checked_guesses(self._drafter.propose(seq, max_tokens), max_tokens, self._vocab_size)

    def ended(self, seq: Sequence) -> None:
        self._drafter.ended(seq)


def checked_guesses(guesses: Iterable[object], max_tokens: int, vocab_size: int) -> list[int]:
    """Return the leading guesses that are token ids or complements of token ids (see DraftTape), at most `max_tokens`.

    What follows an impossible token would be a guess for another text, so it is dropped too.
    """
    checked: list[int] = []
    for guess in guesses:
        if len(checked) >= max_tokens or type(guess) is not int or not -vocab_size <= guess < vocab_size:
            break
        checked.append(guess)
    return checked
