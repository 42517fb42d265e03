"""Read the Markdown pages of the repository: links, headings, file paths in backticks, and fenced shell commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELLS = ("sh", "bash", "shell", "console")

_FENCE = re.compile(r"^\s*(```+|~~~+)\s*(\w*)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)")
_CODE = re.compile(r"(`+)(.+?)\1")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_COMMENT = re.compile(r"(^|\s+)#(\s.*)?$")


@dataclass(frozen=True)
class Found:
    """A link, path or command, and where it is written."""

    text: str
    page: Path
    line: int

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Fence:
    language: str
    lines: tuple[str, ...]
    page: Path
    first_line: int


@cache
def fences_and_prose(page: Path) -> tuple[tuple[Fence, ...], tuple[tuple[int, str], ...]]:
    """Return the fenced blocks, and the other lines with their numbers."""
    fences, prose, block = [], [], None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if block is None and fence is None:
            prose.append((number, line))
        elif block is None and fence is not None:
            block = (fence[1], fence[2], number + 1, [])
        elif block is not None and fence is not None and fence[1].startswith(block[0]) and not fence[2]:
            fences.append(Fence(block[1], tuple(block[3]), page, block[2]))
            block = None
        elif block is not None:
            block[3].append(line)
    assert block is None, f"{page}: the fence before line {block[2]} is not closed"
    return tuple(fences), tuple(prose)


def links(page: Path) -> Iterator[Found]:
    """Yield the targets of all relative links and images."""
    for number, line in fences_and_prose(page)[1]:
        for target in _LINK.findall(_CODE.sub("", line)):
            if not re.match(r"[a-z][a-z+.-]*:", target):
                yield Found(target, page, number)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from the headings."""
    found: set[str] = set()
    for _, line in fences_and_prose(page)[1]:
        if heading := _HEADING.match(line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(next(one for one in (slug, *(f"{slug}-{i}" for i in range(1, 99))) if one not in found))
    return found


def code_words(page: Path) -> Iterator[Found]:
    """Yield the words in backticks, outside of fenced blocks."""
    for number, line in fences_and_prose(page)[1]:
        for _, code in _CODE.findall(line):
            yield from (Found(word, page, number) for word in code.split())


def shell_commands(page: Path) -> Iterator[Found]:
    """Yield the commands of fenced shell blocks, without comments, prompts and a trailing `&`, with single spaces."""
    for fence in fences_and_prose(page)[0]:
        if fence.language in SHELLS:
            yield from _commands(fence)


def _commands(fence: Fence) -> Iterator[Found]:
    begun, begun_at = "", 0
    for number, line in enumerate(fence.lines, fence.first_line):
        line = line.strip().removeprefix("$ ") if not begun else line.strip()
        begun, begun_at = (f"{begun} {line}", begun_at) if begun else (line, number)
        if begun.endswith("\\"):
            begun = begun.removesuffix("\\").rstrip()
            continue
        command = _COMMENT.sub("", begun)
        try:
            shlex.split(command)
        except ValueError:  # an open quote: the command continues on the next line
            if number != fence.first_line + len(fence.lines) - 1:
                continue
        begun = ""
        if command := " ".join(command.removesuffix("&").split()):
            yield Found(command, fence.page, begun_at)


def python_blocks(page: Path) -> Iterator[Found]:
    for fence in fences_and_prose(page)[0]:
        if fence.language == "python":
            yield Found("\n".join(fence.lines), page, fence.first_line)
