"""The grammar that an answer must match. Several fields can set it: OpenAI's, two generations of vLLM's, and SGLang's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.fields import GenerationFields, ResponseFormat
from stoker.sched.request import GrammarSpec

# Maximum length of a grammar or a regular expression. The compiler's memory grows with the square of the length: 0.7 MB of
# rules took 6 GB.
_MAX_CHARS = 1 << 16
_MAX_CHOICES = 20_000  # the compiler's time grows with the square of the number; this many choices take a minute


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must match, and the field that set it."""

    grammar: GrammarSpec
    param: str


def resolve_constraint(
    request: GenerationFields, response_format: ResponseFormat | None, param: str = "response_format"
) -> Constraint | None:
    """Return the constraint of a request. More than one is an error."""
    found = [*_of_format(response_format, param), *_of_guided(request), *_of_structured(request), *_of_sglang(request)]
    if len(found) > 1:
        names = ", ".join(constraint.param for constraint in found)
        raise InvalidRequest(
            f"Only one of these fields can constrain the output: {names}. Send one of them.", param=found[1].param
        )
    return found[0] if found else None


def _of_format(form: ResponseFormat | None, param: str) -> list[Constraint]:
    if form is None or form.type == "text":
        return []
    nested = form.json_schema
    if form.type == "json_object" and form.schema is None and (nested is None or nested.schema is None):
        return [Constraint(GrammarSpec("json_object"), param)]
    if form.type in ("json_schema", "json_object"):
        schema = nested.schema if nested is not None else form.schema
        place = f"{param}.json_schema" if nested is not None or param == "response_format" else param
        if schema is None:
            missing = f"{place}.schema" if nested is not None or param != "response_format" else place
            raise InvalidRequest(f"Missing required parameter: '{missing}'.", param=missing)
        return [Constraint(_schema_grammar(schema, f"{place}.schema"), f"{place}.schema")]
    if form.type in ("regex", "grammar"):
        text = form.regex if form.type == "regex" else form.grammar
        if not text:
            raise InvalidRequest(f"Missing required parameter: '{param}.{form.type}'.", param=f"{param}.{form.type}")
        return [_text_constraint("regex" if form.type == "regex" else "ebnf", text, f"{param}.{form.type}")]
    raise InvalidRequest(
        f"Invalid value for '{param}.type': '{form.type}'. Supported values are: 'text', 'json_object', "
        "'json_schema', 'regex' and 'grammar'.",
        param=f"{param}.type",
    )


def _of_guided(request: GenerationFields) -> list[Constraint]:
    return _of_vllm("guided_", request.guided_json, request.guided_regex, request.guided_grammar, request.guided_choice)


def _of_structured(request: GenerationFields) -> list[Constraint]:
    given, at = request.structured_outputs, "structured_outputs."
    if given is None:
        return []
    found = _of_vllm(at, given.json, given.regex, given.grammar, given.choice)
    return [*found, Constraint(GrammarSpec("json_object"), f"{at}json_object")] if given.json_object else found


def _of_sglang(request: GenerationFields) -> list[Constraint]:
    found = []
    if request.json_schema is not None:
        found.append(Constraint(_schema_grammar(request.json_schema, "json_schema"), "json_schema"))
    if request.regex:
        found.append(_text_constraint("regex", request.regex, "regex"))
    if request.ebnf:
        found.append(_text_constraint("ebnf", request.ebnf, "ebnf"))
    return found


def _of_vllm(
    at: str, schema: dict[str, Any] | str | None, regex: str | None, grammar: str | None, choices: list[str] | None
) -> list[Constraint]:
    """Read the fields that vLLM has both as `guided_...` and in `structured_outputs`."""
    found = []
    if schema is not None:
        found.append(Constraint(_schema_grammar(schema, f"{at}json"), f"{at}json"))
    if regex:
        found.append(_text_constraint("regex", regex, f"{at}regex"))
    if grammar:
        found.append(_text_constraint("ebnf", grammar, f"{at}grammar"))
    if choices is not None:
        found.append(Constraint(_choice_grammar(choices, f"{at}choice"), f"{at}choice"))
    return found


def _text_constraint(kind: Literal["regex", "ebnf"], text: str, param: str) -> Constraint:
    if len(text) > _MAX_CHARS:
        raise InvalidRequest(
            f"Invalid '{param}': {len(text)} characters, more than the {_MAX_CHARS} allowed.", param=param
        )
    return Constraint(GrammarSpec(kind, text), param)


def _schema_grammar(schema: dict[str, Any] | bool | str, param: str) -> GrammarSpec:
    if not isinstance(schema, str):
        return GrammarSpec("json_schema", msgspec.json.encode(schema).decode())
    try:
        parsed = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise InvalidRequest(f"Invalid '{param}': not valid JSON: {wrong}.", param=param) from None
    if not isinstance(parsed, dict | bool):
        raise InvalidRequest(f"Invalid '{param}': a JSON schema must be an object or a boolean.", param=param)
    return GrammarSpec("json_schema", schema)


def _choice_grammar(choices: list[str], param: str) -> GrammarSpec:
    if not choices or not all(choices):
        raise InvalidRequest(f"Invalid '{param}': it needs at least one choice, and none may be empty.", param=param)
    if len(choices) > _MAX_CHOICES:
        raise InvalidRequest(
            f"Invalid '{param}': {len(choices)} choices, more than the {_MAX_CHOICES} allowed.", param=param
        )
    return GrammarSpec("ebnf", "root ::= " + " | ".join(msgspec.json.encode(choice).decode() for choice in choices))
