"""The ids in an answer: a function of the request, so that whoever continues the answer elsewhere gives the same ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

_TAIL_TOKENS = 64
_HEX_DIGITS = 32


@dataclass(frozen=True, slots=True)
class AnswerIds:
    """A client may send one X-Request-Id for all its requests: the time and the prompt keep their answers' ids apart."""

    _root: bytes

    @classmethod
    def of(cls, request_id: str, created: int, prompt_token_ids: Sequence[int]) -> AnswerIds:
        tail = array("I", prompt_token_ids[-_TAIL_TOKENS:]).tobytes()
        head = f"{request_id}\n{created}\n{len(prompt_token_ids)}\n".encode()
        return cls(sha256(head + tail).digest())

    def make(self, prefix: str, *place: int) -> str:
        """`place` tells apart what has the same prefix: a choice's number, an item's, a call's."""
        named = f"{prefix}{place}".encode()
        return prefix + sha256(self._root + named).hexdigest()[:_HEX_DIGITS]
