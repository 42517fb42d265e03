"""The keywords of JSON Schema: the types they apply to, their own form, and the errors for unsupported ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from stoker.base.errors import InvalidRequest

Schema = dict[str, Any]

KEYWORDS_OF_TYPE = {
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
ANY_TYPE = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum", "type", "format")
UNSUPPORTED = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
# All other keywords are annotations.
_TYPED = (keyword for keywords in KEYWORDS_OF_TYPE.values() for keyword in keywords)
CONSTRAINTS = frozenset((*ANY_TYPE, *UNSUPPORTED, "then", "else", *_TYPED))
LOWER_WINS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
HIGHER_WINS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
ALL_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
VALUE_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("properties", "patternProperties"), (dict,)),
    **dict.fromkeys(("required", "allOf", "anyOf", "oneOf", "enum", "prefixItems"), (list,)),
    **dict.fromkeys((*LOWER_WINS, *HIGHER_WINS, "multipleOf"), (int, float)),
    "pattern": (str,),
    "type": (str, list),
}


class Unsatisfiable(InvalidRequest):
    """No value is valid under the schema. An unsatisfiable alternative is left out; otherwise it is the client's mistake."""


def check_value_types(node: Schema, path: str) -> None:
    """Raise InvalidRequest if a keyword has a value of the wrong JSON type."""
    for keyword in VALUE_TYPES.keys() & node.keys():
        value = node[keyword]
        if not isinstance(value, VALUE_TYPES[keyword]) or isinstance(value, bool) or value in (math.inf, -math.inf):
            raise invalid_schema(path, f"{keyword!r} has the invalid value {json.dumps(value)[:80]}")
    for keyword in ("required", "type"):
        if isinstance(node.get(keyword), list) and not all(isinstance(name, str) for name in node[keyword]):
            raise invalid_schema(path, f"{keyword!r} is not a list of strings")


def types_of(node: Schema, path: str) -> list[str]:
    """Return the types that the schema names. Without `type`, they are the types that its keywords apply to."""
    given = node.get("type")
    if given is None:
        return [kind for kind, keywords in KEYWORDS_OF_TYPE.items() if set(keywords) & set(node)]
    kinds = [given] if isinstance(given, str) else given
    if not isinstance(kinds, list) or not kinds or not all(kind in ALL_TYPES for kind in kinds):
        raise invalid_schema(path, f"'type' is {str(given)[:80]!r}, not one of {', '.join(ALL_TYPES)}")
    return [kind for kind in dict.fromkeys(kinds) if not (kind == "integer" and "number" in kinds)]


def expanded_types(given: Any) -> list[str]:
    """Return the value of `type` as a list. An integer is a number, so `number` adds `integer`."""
    kinds = [given] if isinstance(given, str) else list(given)
    return [*kinds, "integer"] if "number" in kinds else kinds


def kinds_allowed(node: Schema) -> Iterable[str]:
    """Return the types of all values that may be valid under the schema."""
    if (values := listed_values(node)) is not None:
        return [kind_of(value) for value in values]
    return expanded_types(node["type"]) if "type" in node else ALL_TYPES


def listed_values(node: Schema) -> list[Any] | None:
    """Return the values of `const` or `enum`, or None without either."""
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


def as_object(node: Any, path: str) -> Schema:
    if node is True:
        return {}
    if node is False:
        raise unsatisfiable(path, "'false' allows no value")
    if not isinstance(node, dict):
        raise invalid_schema(path, f"it is a {type(node).__name__}, but must be an object or a boolean")
    return node


def as_list(value: Any, keyword: str, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise invalid_schema(path, f"{keyword!r} is not an array")
    return value


def whole_number(value: Any, keyword: str, path: str) -> int:
    if not is_number(value) or value != int(value) or value < 0:
        raise invalid_schema(path, f"{keyword!r} is not a non-negative integer")
    return int(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def unsupported_keyword(keyword: str, path: str, why: str = "") -> InvalidRequest:
    reason = f": {why}" if why else ""
    return InvalidRequest(
        f"not a usable json_schema: the keyword {keyword!r} at {path or '/'} cannot be enforced{reason}",
        code="invalid_grammar",
    )


def invalid_schema(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"not a usable json_schema: the schema at {path or '/'}: {why}", code="invalid_grammar")


def unsatisfiable(path: str, why: str) -> Unsatisfiable:
    return Unsatisfiable(f"not a usable json_schema: the schema at {path or '/'}: {why}", code="invalid_grammar")
