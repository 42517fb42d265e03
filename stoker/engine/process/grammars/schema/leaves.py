"""Schemas of what has no parts: listed values, strings, numbers."""

from __future__ import annotations

import math
import re
from typing import Any

from stoker.engine.process.grammars.schema.words import (
    ALL_TYPES,
    OF_TYPE,
    Schema,
    as_list,
    is_number,
    kind_of,
    refused_word,
    same_value,
    types_of,
    unsatisfiable,
    wrong_schema,
)

# Beyond these the compiler drops multipleOf.
_MAX_MULTIPLE = 1024
_MAX_MULTIPLE_RANGE = 9999
# What regular expressions have and automata have not, or what the compiler passes over.
_BEYOND_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(\(\?(?!:)|\\[bBkpP1-9])")
# Characters that JSON escapes, where the compiler would have them as they are.
_ESCAPED_IN_JSON = re.compile(r'["\x00-\x1f]|\\[\\tnrfv0c"]|\\x([01].|22|5[cC])|\\u00([01].|22|5[cC])')
_CLASS_OR_ESCAPE = re.compile(r"\[(?:[^\]\\]|\\.)*\]|\\.")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_NEGATED = re.compile(r"\[\^(?:[^\]\\]|\\.)*\]")


def values_schema(node: Schema, place: str) -> Schema:
    values = [node["const"]] if "const" in node else as_list(node["enum"], "enum", place)
    if "const" in node and "enum" in node:
        values = [value for value in as_list(node["enum"], "enum", place) if same_value(value, node["const"])]
    others = set(node) - {"const", "enum", "type", "format"}
    kinds = types_of({"type": node["type"]}, place) if "type" in node else ALL_TYPES
    values = [
        value for value in values if kind_of(value) in kinds or (kind_of(value) == "integer" and "number" in kinds)
    ]
    touched = {
        word for kind in map(kind_of, values) for word in OF_TYPE.get("number" if kind == "integer" else kind, ())
    }
    for word in sorted(others & (touched | {"anyOf", "oneOf"})):
        raise refused_word(word, place, "there are 'enum' or 'const' beside it")
    if not values:
        raise unsatisfiable(place, "no value of 'enum' or 'const' has the type")
    return {"enum": values}


def string_schema(node: Schema, place: str) -> Schema:
    made: Schema = {"type": "string"}
    lengths: Schema = {word: node[word] for word in ("minLength", "maxLength") if word in node}
    if "pattern" in node:
        _check_pattern(node["pattern"], place)
        for word in lengths:
            raise refused_word(word, place, "there is a 'pattern' beside it")
        made["pattern"] = open_ended(node["pattern"])
    elif lengths:
        made |= lengths
    elif isinstance(node.get("format"), str):
        made["format"] = node["format"]
    return made


def number_schema(kind: str, node: Schema, place: str) -> Schema:
    made: Schema = {"type": kind}
    multiple = node.get("multipleOf")
    if multiple is not None:
        if not is_number(multiple) or multiple != int(multiple) or not 0 < multiple <= _MAX_MULTIPLE:
            raise refused_word("multipleOf", place, f"only whole numbers up to {_MAX_MULTIPLE} are")
        made = {"type": "integer", "multipleOf": int(multiple)}
    for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if word not in node:
            continue
        bound = node[word]
        if not is_number(bound):
            raise wrong_schema(place, f"{word!r} is not a number")
        if made["type"] == "integer":
            lower = word.endswith("inimum")
            whole = math.ceil(bound) if lower else math.floor(bound)
            if word.startswith("exclusive") and whole == bound:
                whole += 1 if lower else -1
            word, pick = ("minimum", max) if lower else ("maximum", min)
            bound = pick(whole, made.get(word, whole))
        made[word] = bound
    span = made.get("maximum", math.inf) - made.get("minimum", -math.inf)
    if multiple is not None and {"minimum", "maximum"} & set(made) and span > _MAX_MULTIPLE_RANGE:
        raise refused_word("multipleOf", place, f"the range is wider than {_MAX_MULTIPLE_RANGE}")
    return made


def check_patterns(patterns: Schema, properties: Schema, place: str) -> None:
    if len(patterns) > 1:
        raise refused_word("patternProperties", place, "there is more than one")
    for pattern in patterns:
        _check_pattern(pattern, place)
        if any(re.search(pattern, name) for name in properties):
            raise refused_word("patternProperties", place, "it holds for a declared property too")


def _check_pattern(pattern: Any, place: str) -> None:
    if not isinstance(pattern, str):
        raise wrong_schema(place, "'pattern' is not a text")
    if found := _BEYOND_REGULAR.search(pattern):
        raise refused_word("pattern", place, f"{found[1]!r} is not supported")
    if any(ord(character) > 0xFFFF for character in pattern):
        raise refused_word("pattern", place, "it has characters beyond U+FFFF")
    if found := _ESCAPED_IN_JSON.search(_NEGATED.sub("", pattern)):
        raise refused_word("pattern", place, f"{found[0]!r} is written with an escape in JSON")
    try:
        re.compile(pattern)
    except re.error as error:
        raise wrong_schema(place, f"'pattern' {pattern[:80]!r} is no regular expression: {error}") from None


def open_ended(pattern: str) -> str:
    """The compiler has patterns match the whole text, JSON Schema any part of it: here, a part that the text begins with.

    Text before that part would be text without an end: nothing but the right characters leads out of it.
    """
    # Beside characters beyond ASCII the compiler would let a pattern match quotes; beside their escapes it does not.
    pattern = _BEYOND_ASCII.sub(lambda found: f"\\u{ord(found[0]):04x}", pattern)
    body = pattern.removeprefix("^")
    if body.endswith("$") or set("^$|") & set(_CLASS_OR_ESCAPE.sub("", body)):
        return pattern
    return f"^(?:{body}).*$"
