"""Converts a JSON schema to one that xgrammar enforces completely, or raises an error that names the keyword.

xgrammar evaluates only one keyword of a schema: the first one present of $ref, const, enum, anyOf, oneOf, allOf and type. It
silently ignores what it does not support. So each schema is converted to a form in which nothing is ignored. That form may
allow less than the schema does (a schema without a type gets the types that its keywords apply to), but never more.
"""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any
from urllib.parse import unquote

from stoker.engine.process.grammars.schema.keywords import (
    CONSTRAINTS,
    COUNTS,
    UNSUPPORTED,
    Schema,
    Unsatisfiable,
    any_of,
    as_list,
    as_object,
    check_value_types,
    invalid_schema,
    kinds_allowed,
    listed_values,
    types_of,
    unsatisfiable,
    unsupported_keyword,
    whole_number,
)
from stoker.engine.process.grammars.schema.leaves import (
    check_patterns,
    number_schema,
    open_ended,
    string_schema,
    values_schema,
)
from stoker.engine.process.grammars.schema.merge import check_evaluation, merge

_MAX_DEPTH = 64
_MAX_PARTS = 20_000  # schemas and enum values; more would take over a minute to compile, and compilers are shared
_MAX_OPTIONAL = 2_000  # optional properties of one object; the compile time grows at least with their square


def enforceable(schema: Any) -> Any:
    """Return the schema to compile. Raises InvalidRequest, which names the keyword that cannot be enforced."""
    return _SchemaConverter(schema).convert()


class _SchemaConverter:
    """Converts one schema document. `path` is the place in the document, for error messages."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # of definitions, by reference
        self._definitions: Schema = {}
        self._num_parts = 0

    def convert(self) -> Any:
        schema = self._schema(self._root, "", 0)
        for definition in self._definitions.values():
            seen = [definition]
            while "$ref" in seen[-1]:
                seen.append(self._definitions[seen[-1]["$ref"].rpartition("/")[2]])
                if len(seen) > len(self._definitions):
                    raise invalid_schema("", "its references are circular")
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    # ---- one schema

    def _schema(self, node: Any, path: str, depth: int) -> Schema:
        if depth > _MAX_DEPTH:
            raise invalid_schema(path, f"it is nested more than {_MAX_DEPTH} levels deep")
        node = as_object(node, path)
        if "$id" in node and depth > 0:
            raise unsupported_keyword("$id", path)
        constraints = set(node) & CONSTRAINTS
        # References are resolved only where there is something to merge, because a schema may contain itself.
        if constraints == {"allOf"} and len(as_list(node["allOf"], "allOf", path)) == 1:
            return self._schema(node["allOf"][0], path, depth + 1)
        if constraints == {"$ref"}:
            return {"$ref": f"#/$defs/{self._definition(node['$ref'], path, depth)}"}
        node = self._flatten(node, path, depth)
        for keyword in UNSUPPORTED:
            if keyword in node and not (keyword == "if" and not {"then", "else"} & set(node)):
                raise unsupported_keyword(keyword, path)
        for keyword in COUNTS:
            if keyword in node:
                node[keyword] = whole_number(node[keyword], keyword, path)
        if "const" in node or "enum" in node:
            self._count(len(node.get("enum", ())))
            return values_schema(node, path)
        if "anyOf" in node or "oneOf" in node:
            return self._alternatives(node, path, depth)
        kinds = types_of(node, path)
        if not kinds:
            return {}
        return any_of([self._typed(kind, node, path, depth) for kind in kinds])

    def _flatten(self, node: Schema, path: str, depth: int) -> Schema:
        """Return the schema with $ref and allOf merged into it."""
        self._count(1)
        check_value_types(node, path)
        if depth > _MAX_DEPTH:
            raise invalid_schema(path, "its references are circular, or it is nested too deeply")
        flat = {
            keyword: value
            for keyword, value in node.items()
            if keyword in CONSTRAINTS and keyword not in ("$ref", "allOf")
        }
        parts = as_list(node["allOf"], "allOf", path) if "allOf" in node else []
        if "$ref" in node:
            parts = [self._resolve(node["$ref"], path), *parts]
        for part in parts:
            resolved = self._flatten(as_object(part, path), path, depth + 1)
            if flat or len(parts) > 1:
                check_evaluation(resolved, path)
            flat = merge(flat, resolved, path)
        return flat

    def _count(self, num_parts: int) -> None:
        self._num_parts += num_parts
        if self._num_parts > _MAX_PARTS:
            raise invalid_schema(
                "", f"with its references resolved, it has more than {_MAX_PARTS} subschemas and enum values"
            )

    def _alternatives(self, node: Schema, path: str, depth: int) -> Schema:
        keyword = "anyOf" if "anyOf" in node else "oneOf"
        if keyword == "anyOf" and "oneOf" in node:
            raise unsupported_keyword("oneOf", path)
        rest = {name: value for name, value in node.items() if name != keyword}
        branches = [branch for branch in as_list(node[keyword], keyword, path) if branch is not False]
        if rest:
            branches = [self._merge_branch(rest, branch, path, depth) for branch in branches]
        if keyword == "oneOf" and any(not self._are_disjoint(a, b, 0) for a, b in permutations(branches, 2)):
            raise unsupported_keyword("oneOf", path, "more than one of its alternatives may match")
        converted = []
        for i, branch in enumerate(branches):
            try:
                converted.append(self._schema(branch, f"{path}/{keyword}/{i}", depth + 1))
            except Unsatisfiable:
                continue
        if not converted:
            raise unsatisfiable(path, f"no alternative of {keyword} can match")
        return any_of(converted)

    def _merge_branch(self, rest: Schema, branch: Any, path: str, depth: int) -> Schema:
        resolved = self._flatten(as_object(branch, path), path, depth + 1)
        check_evaluation(resolved, path)
        return merge(rest, resolved, path)

    # ---- references

    def _definition(self, reference: Any, path: str, depth: int) -> str:
        target = self._resolve(reference, path)
        if reference not in self._names:
            self._names[reference] = name = f"r{len(self._names)}"
            seen = {reference}
            while isinstance(target, dict) and set(target) & CONSTRAINTS == {"$ref"}:  # a reference to a reference
                reference = target["$ref"]
                if reference in seen:
                    raise invalid_schema(path, "its references are circular")
                seen.add(reference)
                target = self._resolve(reference, path)
            self._definitions[name] = {}  # a placeholder: the definition may contain itself
            self._definitions[name] = self._schema(target, path, max(1, depth) if target is not self._root else 0)
            return name
        return self._names[reference]

    def _resolve(self, reference: Any, path: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise unsupported_keyword("$ref", path, f"{str(reference)[:80]!r} does not point into the schema itself")
        target = self._root
        for part in reference[2:].split("/") if reference != "#" else ():
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(name)] if isinstance(target, list) else target[name]
            except (LookupError, ValueError, TypeError):
                raise invalid_schema(path, f"$ref {reference[:80]!r} does not exist") from None
        return target

    # ---- types

    def _typed(self, kind: str, node: Schema, path: str, depth: int) -> Schema:
        match kind:
            case "object":
                return self._object(node, path, depth)
            case "array":
                return self._array(node, path, depth)
            case "string":
                return string_schema(node, path)
            case "number" | "integer":
                return number_schema(kind, node, path)
        return {"type": kind}

    def _object(self, node: Schema, path: str, depth: int) -> Schema:
        declared = as_object(node.get("properties", {}), path)
        required = as_list(node.get("required", []), "required", path)
        patterns = as_object(node.get("patternProperties", {}), path)
        others = node.get("additionalProperties", node.get("unevaluatedProperties"))
        if others is None and not (patterns or "properties" in node):
            others = True
        undeclared = [name for name in required if name not in declared]
        if undeclared and (patterns or others is False):
            raise unsatisfiable(path, f"{undeclared[0]!r} is required but not allowed")
        converted: Schema = {"type": "object"}
        properties = self._properties(declared, required, True if others is None else others, path, depth)
        if len(set(properties) - set(required)) > _MAX_OPTIONAL:
            raise invalid_schema(path, f"it has more than {_MAX_OPTIONAL} optional properties")
        if "propertyNames" in node:
            if properties or patterns:
                raise unsupported_keyword("propertyNames", path, "the object has other properties, too")
            converted["propertyNames"] = self._property_names(node["propertyNames"], path, depth)
        if patterns:
            check_patterns(patterns, properties, path)
            converted["patternProperties"] = {
                open_ended(pattern): self._schema(child, f"{path}/patternProperties", depth + 1)
                for pattern, child in patterns.items()
            }
        if properties:
            converted["properties"] = properties
        if required:
            converted["required"] = required
        if patterns or others is None or others is False:
            converted["additionalProperties"] = False
        else:
            converted["additionalProperties"] = self._schema(others, f"{path}/additionalProperties", depth + 1) or True
        for keyword in ("minProperties", "maxProperties"):
            if keyword in node:
                converted[keyword] = node[keyword]
        if converted.get("minProperties", 0) > 1 and (patterns or converted["additionalProperties"] is not False):
            raise unsupported_keyword("minProperties", path, "an undeclared property could appear twice")
        if converted == {"type": "object", "additionalProperties": True}:
            return {"type": "object"}
        return converted

    def _properties(self, declared: Schema, required: list[Any], others: Any, path: str, depth: int) -> Schema:
        """Convert the declared and the required properties. An unsatisfiable one is left out, unless it is required."""
        properties: Schema = {}
        for name in dict.fromkeys([*declared, *required]):
            try:
                properties[name] = self._schema(declared.get(name, others), f"{path}/properties/{name}", depth + 1)
            except Unsatisfiable:
                if name in required:
                    raise
        return properties

    def _property_names(self, node: Any, path: str, depth: int) -> Schema:
        names = self._flatten(as_object(node, path), path, depth) | {"type": "string"}
        converted = self._schema(names, f"{path}/propertyNames", depth + 1)
        if set(converted) - {"type", "pattern", "minLength", "maxLength", "enum"}:
            raise unsupported_keyword("propertyNames", path)
        return converted

    def _array(self, node: Schema, path: str, depth: int) -> Schema:
        if "contains" in node:
            raise unsupported_keyword("contains", path)
        if node.get("uniqueItems") is True and node.get("maxItems", 2) > 1:
            raise unsupported_keyword("uniqueItems", path)
        prefix, items = node.get("prefixItems", []), node.get("items")
        if isinstance(items, list):  # the form before draft 2020-12
            prefix, items = items, node.get("additionalItems")
        if items is None:
            items = node.get("unevaluatedItems")
        prefix = as_list(prefix, "prefixItems", path)[: node.get("maxItems")]
        if items is None:
            items = not prefix or node.get("minItems", 0) > len(prefix)
        converted: Schema = {"type": "array"}
        if prefix:
            converted["prefixItems"] = [self._schema(item, f"{path}/prefixItems", depth + 1) for item in prefix]
        converted["items"] = False if items is False else self._schema(items, f"{path}/items", depth + 1)
        for keyword in ("minItems", "maxItems"):
            if keyword in node:
                converted[keyword] = node[keyword]
        return converted

    # ---- oneOf

    def _are_disjoint(self, written: Any, other: Any, depth: int) -> bool:
        """Return True if no value written under `written` is valid under `other`. False if that is not known."""
        if other is False or written is False:
            return True
        if depth > 8 or not isinstance(written, dict) or not isinstance(other, dict):
            return False
        written, other = self._flatten(written, "", 0), self._flatten(other, "", 0)
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
            elif self._are_disjoint(properties[name], other_properties.get(name, True), depth + 1):
                return True
        return False
