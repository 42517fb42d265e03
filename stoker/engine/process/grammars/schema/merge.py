"""Schemas that hold together -> one that says the same, where there is one."""

from __future__ import annotations

from typing import Any

from stoker.engine.process.grammars.schema.words import (
    HIGHER_WINS,
    LOWER_WINS,
    Schema,
    expanded_types,
    refused_word,
    same_value,
    unsatisfiable,
)


def merge(a: Schema, b: Schema, place: str) -> Schema:
    """What both say, as one schema."""
    if not a or not b:
        return a or b
    for one, other in ((a, b), (b, a)):
        strangers = sorted(set(other.get("properties", ())) - set(one.get("properties", ())))
        if strangers and one.get("additionalProperties", True) is not True:
            raise refused_word("additionalProperties", place, f"{strangers[0]!r} is declared in another part")
        if ("prefixItems" in one or isinstance(one.get("items"), list)) and {"items", "prefixItems"} & set(other):
            raise refused_word("prefixItems", place, "there are items in another part")
    merged = dict(a)
    for word, value in b.items():
        merged[word] = _both(word, a[word], value, place) if word in a and a[word] != value else value
    return merged


def check_evaluation(part: Schema, place: str) -> None:
    """What a part has not evaluated is not what the merged schema has not."""
    for word in ("unevaluatedProperties", "unevaluatedItems"):
        if word in part:
            raise refused_word(word, place, "there are other parts")


def _both(word: str, a: Any, b: Any, place: str) -> Any:
    if word == "properties":
        return {**a, **{name: {"allOf": [a[name], schema]} if name in a else schema for name, schema in b.items()}}
    if word == "required":
        return list(dict.fromkeys([*a, *b]))
    if word == "type":
        kinds = [kind for kind in expanded_types(a) if kind in expanded_types(b)]
        if not kinds:
            raise unsatisfiable(place, f"no value has the types {a!r} and {b!r}")
        return kinds
    if word == "enum":
        return [value for value in a if any(same_value(value, other) for other in b)]
    if word in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        return {"allOf": [a, b]}
    if word in LOWER_WINS:
        return min(a, b)
    if word in HIGHER_WINS:
        return max(a, b)
    if word in ("format", "then", "else"):
        return a
    raise refused_word(word, place, "it is there in more than one part")
