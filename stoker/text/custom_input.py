"""The input of a custom tool call, taken from the arguments of the function that the model calls instead.

The model writes `{"input": "TEXT"}` as JSON, in pieces. Arguments of any other form are the input as they are.
"""

from __future__ import annotations

import json
import re

_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAY_START = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?\Z')
_WHOLE_PIECES = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\(?!u)[\s\S]|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*'
)
_MAX_ESCAPE = 12  # characters of the longest escape, a surrogate pair


class CustomInput:
    """Turns pieces of arguments into pieces of input. The result does not depend on where a piece ends."""

    def __init__(self) -> None:
        self._held = ""
        self._mode = "start"  # start, text, raw or ended

    def push(self, arguments: str) -> str:
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
        found = _WHOLE_PIECES.match(self._held)
        end = found.end() if found is not None else 0
        whole, self._held = self._held[:end], self._held[end:]
        if self._held.startswith('"'):
            self._mode, self._held = "ended", ""
        elif len(self._held) >= _MAX_ESCAPE:  # not a valid escape: the rest is taken as it is
            whole, self._held = whole + self._held[:1].replace("\\", "\\\\"), self._held[1:]
            return _decoded(whole) + self._unescaped()
        return _decoded(whole)


def _decoded(text: str) -> str:
    try:
        value: str = json.loads(f'"{text}"', strict=False)
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except json.JSONDecodeError:  # an escape that JSON does not have
        return text
