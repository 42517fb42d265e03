"""JSON schemas -> schemas that the grammar compiler holds to, or an error that names the keyword.

The compiler looks at one keyword of a schema ($ref, const, enum, anyOf, oneOf, allOf or type, the first that is there),
and passes over what it cannot do without a word. So each schema is brought into a form in which it misses nothing. That
form may allow less than the schema does (a schema without a type gets those that its keywords speak of), never more.
"""

from __future__ import annotations

import json
import math
import re
from itertools import permutations
from typing import Any
from urllib.parse import unquote

from stoker.worker.schema_words import (
    ALL_TYPES,
    CONSTRAINTS,
    COUNTS,
    HIGHER_WINS,
    LOWER_WINS,
    OF_TYPE,
    REFUSED,
    Schema,
    Unsatisfiable,
    any_of,
    as_list,
    as_object,
    check_shapes,
    expanded_types,
    is_number,
    kind_of,
    kinds_allowed,
    listed_values,
    refused_word,
    same_value,
    types_of,
    unsatisfiable,
    whole_number,
    wrong_schema,
)

# Beyond these the compiler drops multipleOf.
_MAX_MULTIPLE = 1024
_MAX_MULTIPLE_RANGE = 9999
_MAX_DEPTH = 64
_MAX_PARTS = 20_000
# What regular expressions have and automata have not, or what the compiler passes over.
_BEYOND_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(\(\?(?!:)|\\[bBkpP1-9])")
# Characters that JSON escapes, where the compiler would have them as they are.
_ESCAPED_IN_JSON = re.compile(r'["\x00-\x1f]|\\[\\tnrfv0c"]|\\x([01].|22|5[cC])|\\u00([01].|22|5[cC])')
_CLASS_OR_ESCAPE = re.compile(r"\[(?:[^\]\\]|\\.)*\]|\\.")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_NEGATED = re.compile(r"\[\^(?:[^\]\\]|\\.)*\]")


def enforceable(schema: Any) -> Any:
    """The schema that is compiled instead; InvalidRequest names what cannot be enforced."""
    return _Document(schema).whole()


class _Document:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # by reference
        self._definitions: Schema = {}
        self._num_parts = 0

    def whole(self) -> Any:
        schema = self._schema(self._root, "", 0)
        for definition in self._definitions.values():
            seen = [definition]
            while "$ref" in seen[-1]:
                seen.append(self._definitions[seen[-1]["$ref"].rpartition("/")[2]])
                if len(seen) > len(self._definitions):
                    raise wrong_schema("", "its references go in circles")
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    # ---- one schema

    def _schema(self, node: Any, place: str, depth: int) -> Schema:
        if depth > _MAX_DEPTH:
            raise wrong_schema(place, f"it is nested more than {_MAX_DEPTH} deep")
        node = as_object(node, place)
        if "$id" in node and depth > 0:
            raise refused_word("$id", place)
        constraints = set(node) & CONSTRAINTS
        # References are followed only where there is something to merge: a schema may hold itself.
        if constraints == {"allOf"} and len(as_list(node["allOf"], "allOf", place)) == 1:
            return self._schema(node["allOf"][0], place, depth + 1)
        if constraints == {"$ref"}:
            return {"$ref": f"#/$defs/{self._definition(node['$ref'], place, depth)}"}
        node = self._flat(node, place, depth)
        for word in REFUSED:
            if word in node and not (word == "if" and not {"then", "else"} & set(node)):
                raise refused_word(word, place)
        for word in COUNTS:
            if word in node:
                node[word] = whole_number(node[word], word, place)
        if "const" in node or "enum" in node:
            return _values(node, place)
        if "anyOf" in node or "oneOf" in node:
            return self._alternatives(node, place, depth)
        kinds = types_of(node, place)
        if not kinds:
            return {}
        return any_of([self._typed(kind, node, place, depth) for kind in kinds])

    def _flat(self, node: Schema, place: str, depth: int) -> Schema:
        """Without $ref and allOf: what they say is the schema's own."""
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise wrong_schema("", f"with its references followed it has more than {_MAX_PARTS} parts")
        check_shapes(node, place)
        if depth > _MAX_DEPTH:
            raise wrong_schema(place, "its references go in circles, or it is nested too deep")
        flat = {word: value for word, value in node.items() if word in CONSTRAINTS and word not in ("$ref", "allOf")}
        parts = as_list(node["allOf"], "allOf", place) if "allOf" in node else []
        if "$ref" in node:
            parts = [self._resolve(node["$ref"], place), *parts]
        for part in parts:
            said = self._flat(as_object(part, place), place, depth + 1)
            if flat or len(parts) > 1:
                _check_evaluation(said, place)
            flat = _merged(flat, said, place)
        return flat

    def _alternatives(self, node: Schema, place: str, depth: int) -> Schema:
        word = "anyOf" if "anyOf" in node else "oneOf"
        if word == "anyOf" and "oneOf" in node:
            raise refused_word("oneOf", place)
        rest = {name: value for name, value in node.items() if name != word}
        branches = [branch for branch in as_list(node[word], word, place) if branch is not False]
        if rest:
            branches = [self._with(rest, branch, place, depth) for branch in branches]
        if word == "oneOf" and any(not self._apart(a, b, 0) for a, b in permutations(branches, 2)):
            raise refused_word("oneOf", place, "its alternatives may hold together")
        found = []
        for i, branch in enumerate(branches):
            try:
                found.append(self._schema(branch, f"{place}/{word}/{i}", depth + 1))
            except Unsatisfiable:
                continue
        if not found:
            raise unsatisfiable(place, f"no alternative of {word} can be met")
        return any_of(found)

    def _with(self, rest: Schema, branch: Any, place: str, depth: int) -> Schema:
        said = self._flat(as_object(branch, place), place, depth + 1)
        _check_evaluation(said, place)
        return _merged(rest, said, place)

    # ---- references

    def _definition(self, reference: Any, place: str, depth: int) -> str:
        target = self._resolve(reference, place)
        if reference not in self._names:
            self._names[reference] = name = f"r{len(self._names)}"
            seen = {reference}
            while isinstance(target, dict) and set(target) & CONSTRAINTS == {"$ref"}:  # one that is a reference itself
                reference = target["$ref"]
                if reference in seen:
                    raise wrong_schema(place, "its references go in circles")
                seen.add(reference)
                target = self._resolve(reference, place)
            self._definitions[name] = {}  # its place, while it is worked on
            self._definitions[name] = self._schema(target, place, max(1, depth) if target is not self._root else 0)
            return name
        return self._names[reference]

    def _resolve(self, reference: Any, place: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise refused_word("$ref", place, f"{str(reference)[:80]!r} is not in the schema itself")
        target = self._root
        for part in reference[2:].split("/") if reference != "#" else ():
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(name)] if isinstance(target, list) else target[name]
            except (LookupError, ValueError, TypeError):
                raise wrong_schema(place, f"$ref {reference[:80]!r} leads nowhere") from None
        return target

    # ---- types

    def _typed(self, kind: str, node: Schema, place: str, depth: int) -> Schema:
        match kind:
            case "object":
                return self._object(node, place, depth)
            case "array":
                return self._array(node, place, depth)
            case "string":
                return _string(node, place)
            case "number" | "integer":
                return _number(kind, node, place)
        return {"type": kind}

    def _object(self, node: Schema, place: str, depth: int) -> Schema:
        declared = as_object(node.get("properties", {}), place)
        required = as_list(node.get("required", []), "required", place)
        patterns = as_object(node.get("patternProperties", {}), place)
        others = node.get("additionalProperties", node.get("unevaluatedProperties"))
        if others is None and not (patterns or "properties" in node):
            others = True
        made: Schema = {"type": "object"}
        properties: Schema = {}
        for name in [*declared, *(name for name in required if name not in declared)]:
            if name not in declared and (patterns or others is False):
                raise unsatisfiable(place, f"{name!r} is required and not allowed")
            try:
                child = declared.get(name, others if others is not None else True)
                properties[name] = self._schema(child, f"{place}/properties/{name}", depth + 1)
            except Unsatisfiable:
                if name in required:
                    raise
        if "propertyNames" in node:
            if properties or patterns:
                raise refused_word("propertyNames", place, "there are other properties")
            names = self._flat(as_object(node["propertyNames"], place), place, depth) | {"type": "string"}
            made["propertyNames"] = self._schema(names, f"{place}/propertyNames", depth + 1)
            if set(made["propertyNames"]) - {"type", "pattern", "minLength", "maxLength", "enum"}:
                raise refused_word("propertyNames", place)
        if patterns:
            _check_patterns(patterns, properties, place)
            made["patternProperties"] = {
                _open_ended(pattern): self._schema(child, f"{place}/patternProperties", depth + 1)
                for pattern, child in patterns.items()
            }
        if properties:
            made["properties"] = properties
        if required:
            made["required"] = required
        if patterns or others is None or others is False:
            made["additionalProperties"] = False
        else:
            made["additionalProperties"] = self._schema(others, f"{place}/additionalProperties", depth + 1) or True
        for word in ("minProperties", "maxProperties"):
            if word in node:
                made[word] = node[word]
        if made.get("minProperties", 0) > 1 and (patterns or made["additionalProperties"] is not False):
            raise refused_word("minProperties", place, "names that are not declared may come twice")
        if made == {"type": "object", "additionalProperties": True}:
            return {"type": "object"}
        return made

    def _array(self, node: Schema, place: str, depth: int) -> Schema:
        if "contains" in node:
            raise refused_word("contains", place)
        if node.get("uniqueItems") is True and node.get("maxItems", 2) > 1:
            raise refused_word("uniqueItems", place)
        prefix, items = node.get("prefixItems", []), node.get("items")
        if isinstance(items, list):  # as it was before prefixItems
            prefix, items = items, node.get("additionalItems")
        if items is None:
            items = node.get("unevaluatedItems")
        prefix = as_list(prefix, "prefixItems", place)[: node.get("maxItems")]
        if items is None:
            items = not prefix or node.get("minItems", 0) > len(prefix)
        made: Schema = {"type": "array"}
        if prefix:
            made["prefixItems"] = [self._schema(item, f"{place}/prefixItems", depth + 1) for item in prefix]
        made["items"] = False if items is False else self._schema(items, f"{place}/items", depth + 1)
        for word in ("minItems", "maxItems"):
            if word in node:
                made[word] = node[word]
        return made

    # ---- oneOf

    def _apart(self, written: Any, other: Any, depth: int) -> bool:
        """Whether nothing that is written under the one holds under the other. False: not known."""
        if other is False or written is False:
            return True
        if depth > 8 or not isinstance(written, dict) or not isinstance(other, dict):
            return False
        written, other = self._flat(written, "", 0), self._flat(other, "", 0)
        if (ours := listed_values(written)) is not None and (theirs := listed_values(other)) is not None:
            return not {json.dumps(value, sort_keys=True) for value in ours} & {
                json.dumps(value, sort_keys=True) for value in theirs
            }
        kinds, other_kinds = set(kinds_allowed(written)), set(kinds_allowed(other))
        if not kinds & other_kinds:
            return True
        if kinds != {"object"} or "anyOf" in written or "oneOf" in written:
            return False
        properties, other_properties = written.get("properties", {}), other.get("properties", {})
        closed = not written.get("additionalProperties", "properties" not in written) and not (
            {"unevaluatedProperties", "patternProperties"} & set(written)
        )
        for name in other.get("required", ()):
            if name not in properties:
                if closed and name not in written.get("required", ()):
                    return True
            elif self._apart(properties[name], other_properties.get(name, True), depth + 1):
                return True
        return False


def _values(node: Schema, place: str) -> Schema:
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


def _string(node: Schema, place: str) -> Schema:
    made: Schema = {"type": "string"}
    lengths: Schema = {word: node[word] for word in ("minLength", "maxLength") if word in node}
    if "pattern" in node:
        _check_pattern(node["pattern"], place)
        for word in lengths:
            raise refused_word(word, place, "there is a 'pattern' beside it")
        made["pattern"] = _open_ended(node["pattern"])
    elif lengths:
        made |= lengths
    elif isinstance(node.get("format"), str):
        made["format"] = node["format"]
    return made


def _number(kind: str, node: Schema, place: str) -> Schema:
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


def _check_patterns(patterns: Schema, properties: Schema, place: str) -> None:
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


def _open_ended(pattern: str) -> str:
    """The compiler has patterns match the whole text, JSON Schema any part of it: here, a part that the text begins with.

    Text before that part would be text without an end: nothing but the right characters leads out of it.
    """
    # Beside characters beyond ASCII the compiler would let a pattern match quotes; beside their escapes it does not.
    pattern = _BEYOND_ASCII.sub(lambda found: f"\\u{ord(found[0]):04x}", pattern)
    body = pattern.removeprefix("^")
    if body.endswith("$") or set("^$|") & set(_CLASS_OR_ESCAPE.sub("", body)):
        return pattern
    return f"^(?:{body}).*$"


# ---- merging


def _merged(a: Schema, b: Schema, place: str) -> Schema:
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


def _check_evaluation(part: Schema, place: str) -> None:
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


# ---- small things
