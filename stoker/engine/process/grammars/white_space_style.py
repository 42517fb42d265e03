"""WhiteSpaceStyle: which white space an output writes between the parts of its JSON.

A grammar usually allows any white space there. Most outputs write one space after a colon or a comma; some start a new line
for each property. An output rarely changes its style, so what it wrote last is the best guess.
"""

from __future__ import annotations

_SPACES, _STRUCTURE = b" \t\n\r", b"{[,:"
_INDENT = 4  # spaces by which the contents of an object are usually indented


class WhiteSpaceStyle:
    """Follows an output byte by byte, outside of its strings."""

    def __init__(self) -> None:
        self._after = {b"{": b"", b"[": b"", b",": b" ", b":": b" "}
        self._structure = b""  # the structural character before the white space that is being read
        self._space = b""
        self._in_string = False
        self._escaped = False

    def read(self, text: bytes) -> None:
        """Take in the text of the next token."""
        for i in range(len(text)):
            byte = text[i : i + 1]
            if self._in_string:
                self._in_string = self._escaped or byte != b'"'
                self._escaped = byte == b"\\" and not self._escaped
            elif byte in _SPACES:
                self._space += byte
            else:
                self._learn()
                self._structure = byte if byte in _STRUCTURE else b""
                self._in_string = byte == b'"'

    def before(self, last: bytes, following: bytes) -> bytes:
        """Return the white space between a token that ends with `last` and one that begins with `following`."""
        opened = self._after[b"{"]
        if following[:1] in (b"}", b"]"):
            return opened[:-_INDENT] if opened.startswith(b"\n") and len(opened) > _INDENT else b""
        return self._after.get(last[-1:], b"")

    def _learn(self) -> None:
        if self._structure:
            self._after[self._structure] = self._space
            if self._structure == b"{" and b"\n" in self._space:
                self._after[b","] = self._space  # each property on a line of its own
        self._space = b""
