"""Show a custom tool, whose input is text, to the model as a function with one text parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.tools import Function
from stoker.sched.request import TextGrammar

_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_MAX_CHARS = 1 << 16  # of a grammar's definition


def custom_function(name: str, description: str | None, grammar: TextGrammar | None) -> Function:
    """Return the function that the model knows. Its description has the grammar of the input."""
    described = [description] if description else []
    if grammar is not None:
        described.append(f"The input must match this grammar ({grammar.syntax}):\n{grammar.definition}")
    return Function(name=name, description="\n".join(described) or None, parameters=_INPUT, strict=True)


def custom_grammar(form: Mapping[str, Any] | None, place: str) -> TextGrammar | None:
    """Return the grammar of a custom tool's `format`, or None if its input is any text."""
    if form is None or form.get("type") == "text":
        return None
    syntax, definition = form.get("syntax"), form.get("definition")
    if form.get("type") != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise InvalidRequest(
            f"Invalid '{place}': expected {{'type': 'text'}}, or {{'type': 'grammar'}} with 'syntax' (lark or"
            " regex) and 'definition'.",
            param=place,
            code="invalid_value",
        )
    if len(definition) > _MAX_CHARS:
        raise InvalidRequest(
            f"Invalid '{place}.definition': {len(definition)} characters, more than the {_MAX_CHARS} allowed.",
            param=f"{place}.definition",
        )
    return TextGrammar(syntax, definition)


def custom_arguments(text: str) -> str:
    """Return the input of a custom tool call as the arguments of the function that the model knows."""
    return msgspec.json.encode({"input": text}).decode().replace('{"input":', '{"input": ', 1)
