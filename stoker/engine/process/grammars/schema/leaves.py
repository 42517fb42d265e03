"""Converts schemas without subschemas: enum and const, strings, numbers."""

from __future__ import annotations

import math
import re
from typing import Any

from stoker.engine.process.grammars.schema.keywords import (
    ALL_TYPES,
    KEYWORDS_OF_TYPE,
    Schema,
    as_list,
    invalid_schema,
    is_number,
    kind_of,
    same_value,
    types_of,
    unsatisfiable,
    unsupported_keyword,
)

# Beyond these limits, xgrammar ignores multipleOf.
_MAX_MULTIPLE = 1024
_MAX_MULTIPLE_RANGE = 9999
# Syntax that is not regular (look-around, back references, word boundaries), or that xgrammar ignores.
_BEYOND_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(\(\?(?!:)|\\[bBkpP1-9])")
# Characters that must be escaped in JSON. xgrammar would match them unescaped.
_ESCAPED_IN_JSON = re.compile(r'["\x00-\x1f]|\\[\\tnrfv0c"]|\\x([01].|22|5[cC])|\\u00([01].|22|5[cC])')
_CLASS_OR_ESCAPE = re.compile(r"\[(?:[^\]\\]|\\.)*\]|\\.")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_NEGATED = re.compile(r"\[\^(?:[^\]\\]|\\.)*\]")


def values_schema(node: Schema, path: str) -> Schema:
    """Convert `enum` and `const` to an enum of the values that have an allowed type."""
    values = [node["const"]] if "const" in node else as_list(node["enum"], "enum", path)
    if "const" in node and "enum" in node:
        values = [value for value in as_list(node["enum"], "enum", path) if same_value(value, node["const"])]
    others = set(node) - {"const", "enum", "type", "format"}
    kinds = types_of({"type": node["type"]}, path) if "type" in node else ALL_TYPES
    values = [
        value for value in values if kind_of(value) in kinds or (kind_of(value) == "integer" and "number" in kinds)
    ]
    applicable = {
        keyword
        for kind in map(kind_of, values)
        for keyword in KEYWORDS_OF_TYPE.get("number" if kind == "integer" else kind, ())
    }
    for keyword in sorted(others & (applicable | {"anyOf", "oneOf"})):
        raise unsupported_keyword(keyword, path, "it is combined with 'enum' or 'const'")
    if not values:
        raise unsatisfiable(path, "no value of 'enum' or 'const' has the required type")
    return {"enum": values}


def string_schema(node: Schema, path: str) -> Schema:
    """Convert a string. `format` is ignored beside `pattern` or a length limit."""
    converted: Schema = {"type": "string"}
    lengths: Schema = {keyword: node[keyword] for keyword in ("minLength", "maxLength") if keyword in node}
    if "pattern" in node:
        _check_pattern(node["pattern"], path)
        for keyword in lengths:
            raise unsupported_keyword(keyword, path, "it is combined with 'pattern'")
        converted["pattern"] = open_ended(node["pattern"])
    elif lengths:
        converted |= lengths
    elif isinstance(node.get("format"), str):
        converted["format"] = node["format"]
    return converted


def number_schema(kind: str, node: Schema, path: str) -> Schema:
    """Convert a number or integer. The bounds of integers become inclusive integers."""
    converted: Schema = {"type": kind}
    multiple = node.get("multipleOf")
    if multiple is not None:
        if not is_number(multiple) or multiple != int(multiple) or not 0 < multiple <= _MAX_MULTIPLE:
            raise unsupported_keyword("multipleOf", path, f"it must be an integer from 1 to {_MAX_MULTIPLE}")
        converted = {"type": "integer", "multipleOf": int(multiple)}
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if keyword not in node:
            continue
        bound = node[keyword]
        if not is_number(bound):
            raise invalid_schema(path, f"{keyword!r} is not a number")
        if converted["type"] == "integer":
            lower = keyword.endswith("inimum")
            whole = math.ceil(bound) if lower else math.floor(bound)
            if keyword.startswith("exclusive") and whole == bound:
                whole += 1 if lower else -1
            keyword, pick = ("minimum", max) if lower else ("maximum", min)
            bound = pick(whole, converted.get(keyword, whole))
        converted[keyword] = bound
    span = converted.get("maximum", math.inf) - converted.get("minimum", -math.inf)
    if multiple is not None and {"minimum", "maximum"} & set(converted) and span > _MAX_MULTIPLE_RANGE:
        raise unsupported_keyword(
            "multipleOf", path, f"the range from minimum to maximum is wider than {_MAX_MULTIPLE_RANGE}"
        )
    return converted


def check_patterns(patterns: Schema, properties: Schema, path: str) -> None:
    """Raise InvalidRequest if `patternProperties` cannot be enforced beside these declared properties."""
    if len(patterns) > 1:
        raise unsupported_keyword("patternProperties", path, "there is more than one pattern")
    for pattern in patterns:
        _check_pattern(pattern, path)
        if any(re.search(pattern, name) for name in properties):
            raise unsupported_keyword("patternProperties", path, "the pattern matches a declared property, too")


def _check_pattern(pattern: Any, path: str) -> None:
    if not isinstance(pattern, str):
        raise invalid_schema(path, "'pattern' is not a string")
    if found := _BEYOND_REGULAR.search(pattern):
        raise unsupported_keyword("pattern", path, f"{found[1]!r} is not supported")
    if any(ord(character) > 0xFFFF for character in pattern):
        raise unsupported_keyword("pattern", path, "it contains characters above U+FFFF")
    if found := _ESCAPED_IN_JSON.search(_NEGATED.sub("", pattern)):
        raise unsupported_keyword("pattern", path, f"{found[0]!r} must be escaped in JSON")
    try:
        re.compile(pattern)
    except re.error as error:
        raise invalid_schema(path, f"'pattern' {pattern[:80]!r} is not a valid regular expression: {error}") from None


def open_ended(pattern: str) -> str:
    """Return the pattern for xgrammar, which matches patterns against the whole text.

    In JSON Schema, a pattern may match any part of the text. Here it must match at the beginning. Arbitrary text before
    the match would let a model write forever without ever reaching the match.
    """
    # Next to non-ASCII characters, xgrammar would let a pattern match quotes. Next to their escapes, it does not.
    pattern = _BEYOND_ASCII.sub(lambda found: f"\\u{ord(found[0]):04x}", pattern)
    body = pattern.removeprefix("^")
    if body.endswith("$") or set("^$|") & set(_CLASS_OR_ESCAPE.sub("", body)):
        return pattern
    return f"^(?:{body}).*$"
