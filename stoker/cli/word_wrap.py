"""Wrap streamed text at word borders. Each piece of text is shown at once, also when it ends within a word."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.cells import cell_len

_PIECES = re.compile(r"\n|[^\S\n]+|\S+")


@dataclass(frozen=True, slots=True)
class Erase:
    """Erase this number of cells before the cursor."""

    cells: int


class WordWrap:
    """Splits text into lines of at most `width` cells. A word that turns out too long for its line moves to the next one."""

    def __init__(self) -> None:
        self._column = 0
        self._word = ""  # the word at the end of the line, which may go on in the next piece

    def feed(self, text: str, width: int) -> list[str | Erase]:
        """Return what to print, in order."""
        # The last column stays free: terminals differ in where the cursor is after a character there.
        limit = max(width - 1, 1)
        out: list[str | Erase] = []
        for piece in _PIECES.findall(text):
            if piece == "\n":
                out.append(self._new_line())
            elif piece.isspace():
                out.append(self._spaces(piece, limit))
            else:
                out += self._letters(piece, limit)
        return out

    def _new_line(self) -> str:
        self._column, self._word = 0, ""
        return "\n"

    def _spaces(self, piece: str, limit: int) -> str:
        cells = cell_len(piece.expandtabs(8))
        if self._column + cells > limit:
            return self._new_line()
        self._column, self._word = self._column + cells, ""
        return piece.expandtabs(8)

    def _letters(self, piece: str, limit: int) -> list[str | Erase]:
        word = self._word + piece
        if self._column + cell_len(piece) <= limit:
            self._column, self._word = self._column + cell_len(piece), word
            return [piece]
        if cell_len(word) <= limit:
            moved = [Erase(cell_len(self._word))] if self._word else []
            self._column, self._word = cell_len(word), word
            return [*moved, "\n", word]
        return [self._break_anywhere(piece, limit)]

    def _break_anywhere(self, piece: str, limit: int) -> str:
        """Return a word that is longer than a line, such as a URL, with line breaks."""
        out = []
        for character in piece:
            if self._column and self._column + cell_len(character) > limit:
                out.append(self._new_line())
            out.append(character)
            self._column += cell_len(character)
        self._word = ""
        return "".join(out)
