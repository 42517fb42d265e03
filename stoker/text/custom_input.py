"""The input of a custom tool call, taken from the arguments of the function that the model calls instead.

The model writes `{"input": "TEXT"}` as JSON, in pieces. Arguments of any other form are the input as they are.
"""

from __future__ import annotations

import re

_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAY_START = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?\Z')
_PLAIN = re.compile(r'[^"\\]*')
_SIMPLE = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = frozenset("0123456789abcdefABCDEF")


class CustomInput:
    """Turns pieces of arguments into pieces of input. The result does not depend on where a piece ends."""

    def __init__(self) -> None:
        self._held = ""
        self._mode = "start"  # start, text, raw or ended

    def push(self, arguments: str) -> str:
        if self._mode == "ended":
            return ""
        self._held += arguments
        if self._mode == "start":
            found = _START.match(self._held)
            if found is not None:
                self._held, self._mode = self._held[found.end() :], "text"
            elif _MAY_START.match(self._held) is None:
                self._mode = "raw"
        match self._mode:
            case "raw":
                text, self._held = self._held, ""
                return text
            case "text":
                return self._unescaped()
        return ""

    def flush(self) -> str:
        """Return what was held back, if the call was cut off there."""
        held, self._held = self._held, ""
        return held if self._mode in ("start", "raw") else ""

    def _unescaped(self) -> str:
        """Take the whole characters off the text that is held, up to the quote that ends it."""
        texts, held, at = [], self._held, 0
        while at < len(held):
            plain = _PLAIN.match(held, at)
            assert plain is not None
            texts.append(plain.group())
            at = plain.end()
            if at == len(held):
                break
            if held[at] == '"':
                self._mode, at = "ended", len(held)
                break
            found = _escape(held, at)
            if found is None:
                break  # its end has not come
            texts.append(found[0])
            at += found[1]
        self._held = held[at:]
        return "".join(texts)


def _escape(text: str, at: int) -> tuple[str, int] | None:
    """Return the character of the escape at `at` and its length, or None if the text ends in it.

    What is not an escape of JSON stands for itself.
    """
    if at + 1 == len(text):
        return None
    if text[at + 1] != "u":
        return _SIMPLE.get(text[at + 1], text[at : at + 2]), 2
    first = _code(text, at)
    if first is None or first < 0:
        return None if first is None else ("\\", 1)
    if not 0xD800 <= first < 0xDC00:
        return _character(first), 6
    if text[at + 6 : at + 8] not in ("", "\\", "\\u"):
        return _character(first), 6
    second = _code(text, at + 6) if len(text) >= at + 8 else None
    if second is None:
        return None
    if not 0xDC00 <= second < 0xE000:
        return _character(first), 6
    return chr(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00)), 12


def _code(text: str, at: int) -> int | None:
    """Return the number of the escape `\\uXXXX` at `at`: None if the text ends in it, -1 if it is not one."""
    digits = text[at + 2 : at + 6]
    if any(digit not in _HEX for digit in digits):
        return -1
    return int(digits, 16) if len(digits) == 4 else None


def _character(code: int) -> str:
    """Return a character. Half of a surrogate pair is none."""
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)
