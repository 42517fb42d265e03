"""Fields of request bodies that are not declared: accepted, counted, and logged once each. `strict` refuses them.

Agents change what they send overnight, and a server that refuses a new field breaks them. A known field of the wrong type is
always refused.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any, TypeVar

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.base.log import EventLog
from stoker.proto.openai.decode import decode, field_names

T = TypeVar("T", bound=msgspec.Struct)

OTHER = "other"  # the name under which all fields beyond the first _MAX_NAMES are counted
_MAX_NAMES = 64  # clients invent any number of names, and each one is a label of a metric
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class UnknownFields:
    """Decodes request bodies and keeps count of the top-level fields that their type does not declare."""

    def __init__(self, log: EventLog, strict: bool = False) -> None:
        self._log = log
        self._strict = strict
        self.counts: Counter[str] = Counter()

    def decode(self, kind: type[T], body: bytes) -> T:
        """Decode a body. Raises InvalidRequest for a wrong field, and with `strict` for an unknown one."""
        try:
            known: T = decode(_strict(kind), body)
            return known
        except InvalidRequest as refused:
            if self._strict or refused.code != "unknown_parameter":
                raise
        request = decode(kind, body)
        # Only a body with an unknown field is decoded again to find the names of all of them.
        for name in field_names(body) - _names(kind):
            self._count(name)
        return request

    def _count(self, name: str) -> None:
        is_own = name in self.counts or (len(self.counts) < _MAX_NAMES and _PLAIN.fullmatch(name) is not None)
        label = name if is_own else OTHER
        self.counts[label] += 1
        if self.counts[label] == 1:
            self._log.warning(
                "unknown_field", field=label, example=name[:64], hint="accepted and ignored; --strict refuses it"
            )


@functools.cache
def _strict(kind: type[Any]) -> type[Any]:
    """Return the same type without room for unknown fields."""
    return msgspec.defstruct(kind.__name__, [], bases=(kind,), kw_only=True, forbid_unknown_fields=True)


@functools.cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))
