"""The words of JSON Schema: which kinds they speak of, what shape they have, and how one that cannot be held to is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from stoker.base.errors import InvalidRequest

Schema = dict[str, Any]

OF_TYPE = {
    "object": (
        *("properties", "required", "additionalProperties", "unevaluatedProperties"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    ),
    "array": (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems"),
        *("minItems", "maxItems", "uniqueItems", "contains"),
    ),
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
APPLIED = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum", "type", "format")
REFUSED = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
# All else says something about a schema, not about its instances.
CONSTRAINTS = frozenset((*APPLIED, *REFUSED, "then", "else", *(word for words in OF_TYPE.values() for word in words)))
LOWER_WINS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
HIGHER_WINS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
ALL_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
SHAPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("properties", "patternProperties"), (dict,)),
    **dict.fromkeys(("required", "allOf", "anyOf", "oneOf", "enum", "prefixItems"), (list,)),
    **dict.fromkeys((*LOWER_WINS, *HIGHER_WINS, "multipleOf"), (int, float)),
    "pattern": (str,),
    "type": (str, list),
}


class Unsatisfiable(InvalidRequest):
    """A schema that no value can meet: an alternative that is left out, or the client's mistake."""


def check_shapes(node: Schema, place: str) -> None:
    for word in SHAPES.keys() & node.keys():
        value = node[word]
        if not isinstance(value, SHAPES[word]) or isinstance(value, bool) or value in (math.inf, -math.inf):
            raise wrong_schema(place, f"{word!r} is {json.dumps(value)[:80]}")
    for word in ("required", "type"):
        if isinstance(node.get(word), list) and not all(isinstance(name, str) for name in node[word]):
            raise wrong_schema(place, f"{word!r} is not made of texts")


def types_of(node: Schema, place: str) -> list[str]:
    given = node.get("type")
    if given is None:
        return [kind for kind, words in OF_TYPE.items() if set(words) & set(node)]
    kinds = [given] if isinstance(given, str) else given
    if not isinstance(kinds, list) or not kinds or not all(kind in ALL_TYPES for kind in kinds):
        raise wrong_schema(place, f"'type' is {str(given)[:80]!r}, not one of {', '.join(ALL_TYPES)}")
    return [kind for kind in dict.fromkeys(kinds) if not (kind == "integer" and "number" in kinds)]


def expanded_types(given: Any) -> list[str]:
    kinds = [given] if isinstance(given, str) else list(given)
    return [*kinds, "integer"] if "number" in kinds else kinds


def kinds_allowed(node: Schema) -> Iterable[str]:
    if (values := listed_values(node)) is not None:
        return [kind_of(value) for value in values]
    return expanded_types(node["type"]) if "type" in node else ALL_TYPES


def listed_values(node: Schema) -> list[Any] | None:
    values = [node["const"]] if "const" in node else node.get("enum")
    return values if isinstance(values, list) else None


def kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def same_value(a: Any, b: Any) -> bool:
    return kind_of(a) == kind_of(b) and a == b


def any_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def as_object(node: Any, place: str) -> Schema:
    if node is True:
        return {}
    if node is False:
        raise unsatisfiable(place, "'false' allows no value")
    if not isinstance(node, dict):
        raise wrong_schema(place, f"it is a {type(node).__name__}, not an object")
    return node


def as_list(value: Any, word: str, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_schema(place, f"{word!r} is not an array")
    return value


def whole_number(value: Any, word: str, place: str) -> int:
    if not is_number(value) or value != int(value) or value < 0:
        raise wrong_schema(place, f"{word!r} is not a whole number")
    return int(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def refused_word(word: str, place: str, why: str = "") -> InvalidRequest:
    reason = f": {why}" if why else ""
    return InvalidRequest(
        f"not a usable json_schema: the keyword {word!r} at {place or '/'} cannot be enforced{reason}",
        code="invalid_grammar",
    )


def wrong_schema(place: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"not a usable json_schema: the schema at {place or '/'}: {why}", code="invalid_grammar")


def unsatisfiable(place: str, why: str) -> Unsatisfiable:
    return Unsatisfiable(f"not a usable json_schema: the schema at {place or '/'}: {why}", code="invalid_grammar")
