"""JSON schemas -> schemas that the grammar compiler holds to, or an error that names the keyword.

The compiler looks at one keyword of a schema ($ref, const, enum, anyOf, oneOf, allOf or type, the first that is there),
and passes over what it cannot do without a word. So each schema is brought into a form in which it misses nothing. That
form may allow less than the schema does (a schema without a type gets those that its keywords speak of), never more.
"""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any
from urllib.parse import unquote

from stoker.engine.process.grammars.schema.leaves import (
    check_patterns,
    number_schema,
    open_ended,
    string_schema,
    values_schema,
)
from stoker.engine.process.grammars.schema.merge import check_evaluation, merge
from stoker.engine.process.grammars.schema.words import (
    CONSTRAINTS,
    COUNTS,
    REFUSED,
    Schema,
    Unsatisfiable,
    any_of,
    as_list,
    as_object,
    check_shapes,
    kinds_allowed,
    listed_values,
    refused_word,
    types_of,
    unsatisfiable,
    whole_number,
    wrong_schema,
)

_MAX_DEPTH = 64
_MAX_PARTS = 20_000  # and listed values: a minute of compiling, and every grammar waits for a compiler
_MAX_OPTIONAL = 2_000  # properties of one object: with their square, at least, the compiler's time grows


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
            self._count(len(node.get("enum", ())))
            return values_schema(node, place)
        if "anyOf" in node or "oneOf" in node:
            return self._alternatives(node, place, depth)
        kinds = types_of(node, place)
        if not kinds:
            return {}
        return any_of([self._typed(kind, node, place, depth) for kind in kinds])

    def _flat(self, node: Schema, place: str, depth: int) -> Schema:
        """Without $ref and allOf: what they say is the schema's own."""
        self._count(1)
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
                check_evaluation(said, place)
            flat = merge(flat, said, place)
        return flat

    def _count(self, num_parts: int) -> None:
        self._num_parts += num_parts
        if self._num_parts > _MAX_PARTS:
            raise wrong_schema(
                "", f"with its references followed it has more than {_MAX_PARTS} parts and listed values"
            )

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
        check_evaluation(said, place)
        return merge(rest, said, place)

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
                return string_schema(node, place)
            case "number" | "integer":
                return number_schema(kind, node, place)
        return {"type": kind}

    def _object(self, node: Schema, place: str, depth: int) -> Schema:
        declared = as_object(node.get("properties", {}), place)
        required = as_list(node.get("required", []), "required", place)
        patterns = as_object(node.get("patternProperties", {}), place)
        others = node.get("additionalProperties", node.get("unevaluatedProperties"))
        if others is None and not (patterns or "properties" in node):
            others = True
        strange = [name for name in required if name not in declared]
        if strange and (patterns or others is False):
            raise unsatisfiable(place, f"{strange[0]!r} is required and not allowed")
        made: Schema = {"type": "object"}
        properties = self._properties(declared, required, True if others is None else others, place, depth)
        if len(set(properties) - set(required)) > _MAX_OPTIONAL:
            raise wrong_schema(place, f"more than {_MAX_OPTIONAL} of its properties need not be there")
        if "propertyNames" in node:
            if properties or patterns:
                raise refused_word("propertyNames", place, "there are other properties")
            made["propertyNames"] = self._property_names(node["propertyNames"], place, depth)
        if patterns:
            check_patterns(patterns, properties, place)
            made["patternProperties"] = {
                open_ended(pattern): self._schema(child, f"{place}/patternProperties", depth + 1)
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

    def _properties(self, declared: Schema, required: list[Any], others: Any, place: str, depth: int) -> Schema:
        """Those that have a name here. One that no value can meet is left out, unless it must be there."""
        properties: Schema = {}
        for name in dict.fromkeys([*declared, *required]):
            try:
                properties[name] = self._schema(declared.get(name, others), f"{place}/properties/{name}", depth + 1)
            except Unsatisfiable:
                if name in required:
                    raise
        return properties

    def _property_names(self, node: Any, place: str, depth: int) -> Schema:
        names = self._flat(as_object(node, place), place, depth) | {"type": "string"}
        made = self._schema(names, f"{place}/propertyNames", depth + 1)
        if set(made) - {"type", "pattern", "minLength", "maxLength", "enum"}:
            raise refused_word("propertyNames", place)
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
