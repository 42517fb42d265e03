"""Rejections: remembers why grammars cannot be used, so that they are not compiled again. Thread-safe."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from stoker.base.errors import InvalidRequest
from stoker.sched.request import GrammarSpec

_MAX_BYTES = 4 << 20
_ENTRY_BYTES = 300  # of the table, for each entry


class Rejections:
    """The reasons of the grammars that were rejected most recently. Only reasons that never change belong here."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._reasons: OrderedDict[bytes, str] = OrderedDict()  # by the grammar's hash
        self._num_bytes = 0
        self._lock = threading.Lock()

    def check(self, spec: GrammarSpec) -> None:
        """Raise InvalidRequest if the grammar was rejected before."""
        with self._lock:
            reason = self._reasons.get(_digest(spec))
            if reason is not None:
                self._reasons.move_to_end(_digest(spec))
        if reason is not None:
            raise InvalidRequest(reason, code="invalid_grammar")

    def add(self, spec: GrammarSpec, reason: str) -> None:
        """Remember a rejection, and forget the oldest ones beyond the limit."""
        with self._lock:
            before = self._reasons.pop(_digest(spec), None)
            self._num_bytes -= 0 if before is None else _size(before)
            self._reasons[_digest(spec)] = reason
            self._num_bytes += _size(reason)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._reasons.popitem(last=False)
                self._num_bytes -= _size(oldest)

    def __len__(self) -> int:
        return len(self._reasons)


def _digest(spec: GrammarSpec) -> bytes:
    inputs = "".join(f"\0{one.grammar.syntax}\0{one.grammar.definition}" for one in spec.inputs)
    return hashlib.sha256(f"{spec.kind}\0{spec.text}{inputs}".encode("utf-8", "surrogatepass")).digest()


def _size(reason: str) -> int:
    return _ENTRY_BYTES + 4 * len(reason)
