"""A stream as a gateway sees it: events, the notes before them, and the field that resumes it on another worker."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Block:
    """The lines between two blank lines."""

    lines: list[bytes]
    event: bytes

    @property
    def data(self) -> Any:
        (line,) = [line for line in self.event.splitlines() if line.startswith(b"data: ")]
        return None if line == b"data: [DONE]" else json.loads(line.removeprefix(b"data: "))


@dataclass
class Seen:
    """What the notes of some blocks say."""

    created: int = 0
    seed: int = 0
    usage: tuple[int, int] = (0, 0)
    tokens: dict[int, list[bytes]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    ended: bool = False

    def read(self, blocks: list[Block]) -> Seen:
        for line in (line for block in blocks for line in block.lines):
            kind, _, rest = line.partition(b" ")
            if kind == b":u":
                prompt, cached, self.created, self.seed = map(int, rest.split())
                self.usage = (prompt, cached)
            elif kind == b":t":
                index, *tokens = rest.split(b" ")
                self.tokens.setdefault(int(index), []).extend(tokens)
            elif kind == b":f":
                self.finished.add(int(rest))
            else:
                assert line == b":e", line
                self.ended = True
        return self

    def resume(self, num_choices: int, **fields: Any) -> dict[str, Any]:
        choices = []
        for i in range(num_choices):
            tokens = b"[" + b",".join(self.tokens.get(i, [])) + b"]"
            choices.append({"token_ids": json.loads(tokens), "finished": i in self.finished})
        return {"created": self.created, "choices": choices} | fields


def blocks_of(body: bytes) -> list[Block]:
    assert body.endswith(b"\n\n") or body == b"\n", body[-40:]
    blocks = []
    for part in body.split(b"\n\n")[:-1]:
        lines = part.split(b"\n")
        comments = [line for line in lines if line.startswith(b":")]
        assert lines[: len(comments)] == comments, "comments stand in front of their event"
        assert all(line.isascii() for line in comments)
        blocks.append(Block(comments, b"\n".join(lines[len(comments) :])))
    return blocks


def shown(blocks: list[Block]) -> list[bytes]:
    """Return the events that the client gets."""
    return [block.event for block in blocks if block.event]


def cuts(blocks: list[Block]) -> list[int]:
    """Return after how many blocks a stream can continue elsewhere. Between the usage and [DONE], the gateway writes
    the rest itself."""
    found = []
    for count in range(1, len(blocks) + 1):
        seen = Seen().read(blocks[:count])
        if seen.created and not seen.ended:
            found.append(count)
    return found
