"""Build grammars that force tool calls, as structural tags. The marks of the formats are arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stoker.sched.request import GrammarSpec

Format = dict[str, Any]

# Maximum consecutive white space. Without a limit, a model that is forced to write JSON may write spaces without end.
_WHITESPACE_CHARS = 16


def functions(tools: Sequence[dict[str, Any]]) -> list[tuple[str, Format]]:
    """Return the name of each tool and the format of its arguments: its schema, or any object."""
    found = []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object"}
        found.append(
            (
                function["name"],
                {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _WHITESPACE_CHARS},
            )
        )
    return found


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def calls(tags: Sequence[Format], separator: str, parallel: bool) -> Format:
    """Return the format of one call or, with `parallel`, of one or more calls with a separator between them."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def structural_tag(content: Format) -> GrammarSpec:
    spec = {"type": "structural_tag", "format": content}
    return GrammarSpec(kind="structural_tag", text=json.dumps(spec, ensure_ascii=False))
