"""Merges schemas that must all be valid into one schema, where that is possible."""

from __future__ import annotations

from typing import Any

from stoker.engine.process.grammars.schema.keywords import (
    HIGHER_WINS,
    LOWER_WINS,
    Schema,
    expanded_types,
    same_value,
    unsatisfiable,
    unsupported_keyword,
)


def merge(a: Schema, b: Schema, path: str) -> Schema:
    """Return a schema that is valid where both are valid."""
    if not a or not b:
        return a or b
    for one, other in ((a, b), (b, a)):
        undeclared = sorted(set(other.get("properties", ())) - set(one.get("properties", ())))
        if undeclared and one.get("additionalProperties", True) is not True:
            raise unsupported_keyword(
                "additionalProperties", path, f"{undeclared[0]!r} is declared in another subschema"
            )
        if ("prefixItems" in one or isinstance(one.get("items"), list)) and {"items", "prefixItems"} & set(other):
            raise unsupported_keyword("prefixItems", path, "another subschema has items, too")
    merged = dict(a)
    for keyword, value in b.items():
        merged[keyword] = (
            _merge_values(keyword, a[keyword], value, path) if keyword in a and a[keyword] != value else value
        )
    return merged


def check_evaluation(part: Schema, path: str) -> None:
    """Reject unevaluatedProperties and unevaluatedItems: their meaning would change by merging."""
    for keyword in ("unevaluatedProperties", "unevaluatedItems"):
        if keyword in part:
            raise unsupported_keyword(keyword, path, "the schema has other subschemas")


def _merge_values(keyword: str, a: Any, b: Any, path: str) -> Any:
    if keyword == "properties":
        return {**a, **{name: {"allOf": [a[name], schema]} if name in a else schema for name, schema in b.items()}}
    if keyword == "required":
        return list(dict.fromkeys([*a, *b]))
    if keyword == "type":
        kinds = [kind for kind in expanded_types(a) if kind in expanded_types(b)]
        if not kinds:
            raise unsatisfiable(path, f"no value has both types {a!r} and {b!r}")
        return kinds
    if keyword == "enum":
        return [value for value in a if any(same_value(value, other) for other in b)]
    if keyword in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        return {"allOf": [a, b]}
    if keyword in LOWER_WINS:
        return min(a, b)
    if keyword in HIGHER_WINS:
        return max(a, b)
    if keyword in ("format", "then", "else"):
        return a
    raise unsupported_keyword(keyword, path, "it appears in more than one subschema")
