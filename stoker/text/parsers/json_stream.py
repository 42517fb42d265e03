"""Parse JSON that arrives in pieces: find the end of a value, and read the fields of a tool call's object.

The text is kept as the model wrote it, and the content of the arguments is not checked. This module does not know the marks
around the JSON.
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
    """Finds the end of one JSON value."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.first = ""  # the first character, which shows the type of the value
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Read `text` from index `at`. Return the index after the value, or len(text) if the value is not complete."""
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
    """Reads an object like {"name": …, "arguments": {…}}, with the fields in any order and with other fields."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.name: str | None = None
        self._arguments = ""  # text of the arguments that was not taken yet
        self._arguments_kind = ""  # the first character of the arguments; empty: none so far
        self._in_arguments = False
        self._expect = _Expect.OBJECT
        self._value: JsonValue | None = None
        self._text = ""  # text of the key or value that is being read
        self._key = ""

    @property
    def streams(self) -> bool:
        """True if the function is known and its arguments are an object: then they can be streamed."""
        return self.name is not None and self._arguments_kind == "{"

    def take_arguments(self) -> str:
        taken, self._arguments = self._arguments, ""
        return taken

    def final_arguments(self) -> str:
        """Return the arguments of a complete call that was not streamed: JSON text inside a JSON string, or no arguments."""
        written = self.take_arguments()
        if self._arguments_kind == '"':
            return _unquote(written)
        return written if written and written != "null" else "{}"

    def feed(self, text: str) -> int:
        """Read `text`. Return the number of characters read: it stops when the object ends, is invalid, or its name is known."""
        at, name = 0, self.name
        while at < len(text) and not self.done and not self.broken and self.name is name:
            if self._value is None:
                space = _SPACE.match(text, at)
                at = space.end() if space else self._step(text, at)
            else:
                at = self._read(self._value, text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        """Read one character of the object's structure."""
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
            # A second field with this name is ignored.
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
        text = str(json.loads(written, strict=False))
    except ValueError:
        return written
    # JSON can contain half a surrogate pair, which cannot be encoded in a response.
    return text.encode("utf-8", "replace").decode()
