"""JSON that is still being written: where a value ends, and what a call's object has said so far.

It follows brackets and strings and keeps the text as it was written. It refuses to know marks around the JSON, and does
not judge what is inside the arguments: a client gets what the model wrote.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_PLAIN_STRING = re.compile(r'[^"\\]+')
_PLAIN_NESTED = re.compile(r'[^"{}\[\]]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_SPACE = re.compile(r"[ \t\r\n]+")
_CLOSER = {"{": "}", "[": "]"}


class JsonValue:
    """One JSON value. `feed` takes what belongs to it and leaves the rest."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.first = ""  # the value's first character tells its kind
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Reads `text` from `at` on and returns where it stopped: at the end of the text, or of the value."""
        if not self.first and at < len(text):
            self.first = text[at]
            if self.first not in '{["' and not _SCALAR.match(self.first):
                self.broken = True
        while at < len(text) and not self.done and not self.broken:
            at = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        if self._in_string:
            return self._step_string(text, at)
        if not self._closers and self.first not in '{["':
            run = _SCALAR.match(text, at)
            self.done = run is None
            return run.end() if run else at
        run = _PLAIN_NESTED.match(text, at) if self._closers else None
        if run:
            return run.end()
        char = text[at]
        if char == '"':
            self._in_string = True
        elif char in _CLOSER:
            self._closers.append(_CLOSER[char])
        elif char == self._closers[-1]:
            self._closers.pop()
            self.done = not self._closers
        else:
            self.broken = True
            return at
        return at + 1

    def _step_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        run = _PLAIN_STRING.match(text, at)
        if run:
            return run.end()
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._closers
        return at + 1


class _Expect(Enum):
    OBJECT = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class CallObject:
    """An object like {"name": …, "arguments": {…}}, in any order and with other fields in it, as it comes."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.name: str | None = None
        self._arguments = ""  # as written, not yet taken
        self._arguments_kind = ""  # its first character; empty: no arguments so far
        self._in_arguments = False
        self._expect = _Expect.OBJECT
        self._value: JsonValue | None = None
        self._text = ""  # of the key or value that is being read
        self._key = ""

    @property
    def streams(self) -> bool:
        """The function is known and its arguments are an object: they can go out as they come."""
        return self.name is not None and self._arguments_kind == "{"

    def take_arguments(self) -> str:
        taken, self._arguments = self._arguments, ""
        return taken

    def final_arguments(self) -> str:
        """The arguments of a whole call that did not stream: a JSON text inside a JSON string, or none at all."""
        written = self.take_arguments()
        if self._arguments_kind == '"':
            return _unquote(written)
        return written if written and written != "null" else "{}"

    def feed(self, text: str) -> int:
        """Returns how many characters it took: all, unless the object ended or broke before, or said its name."""
        at, name = 0, self.name
        while at < len(text) and not self.done and not self.broken and self.name is name:
            if self._value is None:
                space = _SPACE.match(text, at)
                at = space.end() if space else self._step(text, at)
            else:
                at = self._read(self._value, text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        """One character of the object's own structure."""
        char, expect = text[at], self._expect
        if expect is _Expect.OBJECT and char == "{":
            self._expect = _Expect.KEY_OR_END
        elif expect is _Expect.COLON and char == ":":
            self._expect = _Expect.VALUE
        elif expect is _Expect.COMMA_OR_END and char == ",":
            self._expect = _Expect.KEY
        elif expect in (_Expect.KEY_OR_END, _Expect.COMMA_OR_END) and char == "}":
            self.done = True
        elif expect is _Expect.VALUE or (expect in (_Expect.KEY, _Expect.KEY_OR_END) and char == '"'):
            self._value, self._text = JsonValue(), ""
            # A second field of that name is only another field.
            named = self._key in ("arguments", "parameters") and not self._arguments_kind
            self._in_arguments = expect is _Expect.VALUE and named
            if self._in_arguments:
                self._arguments_kind = char
            return at
        else:
            self.broken = True
            return at
        return at + 1

    def _read(self, value: JsonValue, text: str, at: int) -> int:
        end = value.feed(text, at)
        if self._in_arguments:
            self._arguments += text[at:end]
        elif self._expect is not _Expect.VALUE or self._key == "name":
            self._text += text[at:end]
        self.broken = value.broken
        if value.done:
            self._value = None
            self._finish()
        return end

    def _finish(self) -> None:
        if self._expect is not _Expect.VALUE:
            self._key = _unquote(self._text)
            self._expect = _Expect.COLON
            return
        self._expect = _Expect.COMMA_OR_END
        if self._key == "name" and self.name is None:
            self.name = _unquote(self._text) if self._text.startswith('"') else ""
            self.broken = not self.name


def _unquote(written: str) -> str:
    try:
        said = str(json.loads(written, strict=False))
    except ValueError:
        return written
    # Half a surrogate pair can be written so, but is no character: no answer could carry it.
    return said.encode("utf-8", "replace").decode()
