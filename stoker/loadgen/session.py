"""What a load consists of: sessions of turns. A turn is one request."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, count
from typing import Any, ClassVar, Protocol

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

Message = dict[str, Any]


class PromptSource(Protocol):
    """Makes the prompt of a request when it is sent: a long trace would not fit in memory as tokens."""

    path: ClassVar[str]

    def fields(self, answers: Sequence[str]) -> dict[str, Any]:
        """Return the prompt's fields of the body. `answers` are the server's answers to the session's earlier turns."""


@dataclass(frozen=True, slots=True)
class Messages:
    """The first `count` messages of a recorded conversation. All turns share one list."""

    conversation: Sequence[Message]
    count: int
    tools: Sequence[dict[str, Any]] = ()
    path: ClassVar[str] = CHAT_PATH

    def fields(self, answers: Sequence[str]) -> dict[str, Any]:
        fields: dict[str, Any] = {"messages": self.conversation[: self.count]}
        if self.tools:
            fields["tools"] = self.tools
        return fields


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The user's messages so far, with the server's own answers between them."""

    user_messages: Sequence[str]
    path: ClassVar[str] = CHAT_PATH

    def fields(self, answers: Sequence[str]) -> dict[str, Any]:
        messages: list[Message] = []
        for index, text in enumerate(self.user_messages):
            messages.append({"role": "user", "content": text})
            if index < len(self.user_messages) - 1:
                messages.append({"role": "assistant", "content": answers[index]})
        return {"messages": messages}


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The ids of generated prompts. The lowest ids are excluded: many tokenizers have special tokens there."""

    first: int = 1000
    end: int = 32000

    @classmethod
    def below(cls, vocab_size: int) -> TokenRange:
        return cls(min(cls().first, vocab_size // 2), vocab_size)

    def sample(self, key: str, num_tokens: int) -> array[int]:
        """Return tokens that depend on the key alone, on any machine."""
        return _sample(self, key, num_tokens)


@lru_cache(maxsize=1 << 16)  # a session resends its blocks with every turn
def _sample(token_range: TokenRange, key: str, num_tokens: int) -> array[int]:
    words = struct.unpack(f"<{num_tokens}I", hashlib.shake_128(key.encode()).digest(4 * num_tokens))
    span = token_range.end - token_range.first
    return array("I", [token_range.first + word % span for word in words])


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt of `num_tokens` tokens. The tokens of a block are generated from its name: equal names give equal tokens.
    Tokens after the last named block are generated from `tail`.
    """

    names: Iterable[str]
    tail: str
    block_tokens: int
    num_tokens: int
    token_range: TokenRange
    path: ClassVar[str] = COMPLETIONS_PATH

    def fields(self, answers: Sequence[str]) -> dict[str, Any]:
        tokens: list[int] = []
        for name in chain(self.names, (f"{self.tail}-{number}" for number in count())):
            if len(tokens) >= self.num_tokens:
                break
            tokens += self.token_range.sample(name, self.block_tokens)
        return {"prompt": tokens[: self.num_tokens]}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    prompt: PromptSource
    session: str  # the session id in the affinity header; a sub-agent has its own
    parent: str = ""
    max_tokens: int | None = None  # None: the limit of the whole run
    pause_s: float = 0.0  # the client's think time before it sends


@dataclass(frozen=True, slots=True)
class LoadSession:
    """Turns that are sent one after another, each when the last one was answered."""

    turns: Sequence[Turn]
    start_s: float | None = None  # from a trace; None: given by the load plan


def first_requests(
    sessions: Iterable[LoadSession], num_requests: int | None, max_turns: int | None
) -> Iterator[LoadSession]:
    """Yield sessions until they hold `num_requests` turns. The last one is cut to fit."""
    left = num_requests
    for session in sessions:
        turns = session.turns[:max_turns]
        if left is not None:
            turns = turns[:left]
            left -= len(turns)
        if turns:
            yield replace(session, turns=turns)
        if left == 0:
            return
