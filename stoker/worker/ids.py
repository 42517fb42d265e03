"""The ids in an answer. They are a function of the request, so that another worker that continues the answer uses the same ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

_TAIL_TOKENS = 64
_HEX_DIGITS = 32


@dataclass(frozen=True, slots=True)
class AnswerIds:
    """Makes ids from the request id, the time and the prompt: a client may use one X-Request-Id for all its requests."""

    _root: bytes

    @classmethod
    def of(cls, request_id: str, created: int, prompt_token_ids: Sequence[int]) -> AnswerIds:
        tail = array("I", prompt_token_ids[-_TAIL_TOKENS:]).tobytes()
        head = f"{request_id}\n{created}\n{len(prompt_token_ids)}\n".encode()
        return cls(sha256(head + tail).digest())

    def make(self, prefix: str, *place: int) -> str:
        """Return an id. `place` distinguishes ids with the same prefix: the index of a choice, an item or a call."""
        named = f"{prefix}{place}".encode()
        return prefix + sha256(self._root + named).hexdigest()[:_HEX_DIGITS]
