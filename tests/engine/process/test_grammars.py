"""XGrammars with SmolLM2's vocabulary, without the model: what is rejected, what is allowed, and completion in time."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar

from stoker.base.errors import InvalidRequest
from stoker.engine.process.grammars import endings, grammar_cache
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.engine.process.grammars.schema.enforce import enforceable
from stoker.sched.request import GrammarSpec
from stoker.text.parsers.contract import ToolArgumentsDelta
from stoker.text.parsers.grammar import structural_tag
from stoker.text.parsers.tools.hermes import HermesParser
from stoker.text.tokenizer import Tokenizer

VOCAB_SIZE = 49152
sys.path.insert(0, str(Path(__file__).parents[3]))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> XGrammars:
    return XGrammars(tokenizer, VOCAB_SIZE)


@pytest.fixture(scope="module")
def accepts(grammars: XGrammars, tokenizer: Tokenizer) -> Callable[[GrammarSpec, str], bool]:
    """Return True if the whole text is an output of the grammar."""

    def accepts(spec: GrammarSpec, text: str) -> bool:
        matcher = grammars.matcher(spec, [])
        ids = [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
        return all(matcher.accept(token_id) for token_id in ids)

    return accepts


def test_tokens_outside_the_models_vocabulary_are_not_allowed(tokenizer: Tokenizer) -> None:
    """Some tokenizers have tokens that were added after the model was trained."""
    fewer = VOCAB_SIZE - 64
    matcher = XGrammars(tokenizer, fewer).matcher(GrammarSpec("regex", "[a-z]+"), [])
    allowed = torch.zeros(fewer // 32, dtype=torch.int32)
    matcher.fill(allowed)
    assert bool(allowed.any())


def test_special_tokens_in_a_tools_schema_need_no_other_compiler(tokenizer: Tokenizer) -> None:
    """Each compiler keeps its own vocabulary of tens of megabytes."""
    grammars = XGrammars(tokenizer, VOCAB_SIZE)
    for mark in ("", "<|im_start|>", "<repo_name>", "<|im_start|> <repo_name>"):
        parameters = {"type": "object", "properties": {"x": {"type": "string", "description": f"like {mark}"}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        grammars.prepare(structural_tag(HermesParser.calls([tool], parallel=True)))
    assert len(grammars._compilers) == 1


def schema_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def allowed_ids(matcher: Any) -> np.ndarray[Any, Any]:
    mask = torch.zeros(VOCAB_SIZE // 32, dtype=torch.int32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))


def written(grammars: XGrammars, spec: GrammarSpec, max_tokens: int, seed: int) -> tuple[list[int], bool]:
    """Return random output of a grammar, and whether it is complete."""
    random = np.random.default_rng(seed)
    matcher, ids = grammars.matcher(spec, [], max_tokens), []
    while len(ids) < max_tokens and not matcher.done:
        allowed = allowed_ids(matcher)
        assert len(allowed), "no way on"
        ids.append(int(random.choice(allowed)))
        assert matcher.accept(ids[-1])
    return ids, matcher.done


def instances(entry: dict[str, Any], kind: str) -> list[tuple[str, str]]:
    """Return the text as the grammar writes it: values of `const` and `enum` without spaces."""
    return [
        (json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        for value in entry[kind]
    ]


@pytest.fixture(scope="module")
def suite(data_dir: Path) -> list[dict[str, Any]]:
    with gzip.open(data_dir / "tools" / "json_schema_suite.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_invalid_values_are_not_allowed_or_the_schema_is_rejected(
    suite: list[dict[str, Any]], grammars: XGrammars, accepts: Callable[[GrammarSpec, str], bool]
):
    refused = allowed = rightly = 0
    for entry in suite:
        spec = schema_spec(entry["schema"])
        try:
            grammars.prepare(spec)
        except InvalidRequest:
            refused += 1
            continue
        for texts in instances(entry, "invalid"):
            assert not any(accepts(spec, text) for text in texts), (entry["id"], texts)
        for texts in instances(entry, "valid"):
            allowed += 1
            rightly += any(accepts(spec, text) for text in texts)
    assert refused <= 130
    # The others have types that the keywords do not apply to, undeclared properties, or 1.0 for 1.
    assert rightly / allowed > 0.8


def test_random_output_of_every_schema_is_complete_and_valid(
    suite: list[dict[str, Any]], grammars: XGrammars, tokenizer: Tokenizer
):
    for seed, entry in enumerate(suite):
        spec = schema_spec(entry["schema"])
        try:
            ids, done = written(grammars, spec, 64, seed)
        except InvalidRequest:
            continue
        text = tokenizer.decode(ids)
        assert done, (entry["id"], text)
        draft = jsonschema.Draft7Validator if entry["id"].startswith("draft7") else jsonschema.Draft202012Validator
        draft(entry["schema"]).validate(json.loads(text))


def test_random_calls_of_real_functions_are_complete_and_valid(
    data_dir: Path, grammars: XGrammars, tokenizer: Tokenizer
):
    from bench.engine.structured_output import bfcl_cases

    for seed, case in enumerate(bfcl_cases(data_dir / "tools")[::40]):
        spec = structural_tag(HermesParser.calls(case.body["tools"], parallel=False))
        ids, done = written(grammars, spec, 128, seed)
        text = tokenizer.decode(ids)
        assert done, (case.id, text)
        parser = HermesParser(case.body["tools"])
        deltas = parser.push(text) + parser.flush()
        case.validate("".join(delta.text for delta in deltas if isinstance(delta, ToolArgumentsDelta)))


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
        ({"type": "array", "contains": {"type": "string"}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "maxLength"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "string", "pattern": '^"$'}, "pattern"),
        ({"$ref": "https://example.com/schema.json"}, "$ref"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "patternProperties"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_named(grammars: XGrammars, schema: Any, word: str):
    nested = {"type": "object", "properties": {"deep": schema}}
    for spec in (schema_spec(schema), schema_spec(nested), forced_call(nested)):
        with pytest.raises(InvalidRequest, match=re.escape(repr(word))) as refused:
            grammars.prepare(spec)
        assert refused.value.code == "invalid_grammar"


def forced_call(schema: Any) -> GrammarSpec:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return structural_tag(HermesParser.calls([tool], parallel=False))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "description": "any", "default": {}}, '{"a": [1]}', "[]"),
        ({"type": "string", "format": "colour", "examples": ["red"], "deprecated": True}, '"red"', "1"),
        ({"type": "string", "enum": ["a", "b"], "title": "T", "x-order": 1}, '"b"', '"c"'),
        ({"maxItems": 1}, "[1]", "[1, 2]"),
        ({"type": "array", "minItems": 1}, "[1]", "[]"),
        ({"type": "object", "required": ["a"]}, '{"a": 1}', "{}"),
        ({"type": "integer", "multipleOf": 3}, "9", "7"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, '"abc"', '"a"'),
        ({"pattern": "a+"}, '"aay"', '"xy"'),
        ({"type": "object", "patternProperties": {"^á": {}}}, '{"áb": 1}', '{"b": 1}'),
        ({"allOf": [{"type": "object", "properties": {"a": {}}}, {"required": ["a"]}]}, '{"a": 1}', "{}"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}}, "1", '"a"'),
        ({"items": [{"type": "integer"}], "additionalItems": {"type": "string"}}, '[1, "a"]', "[1, 2]"),
        ({"type": "string", "anyOf": [{"enum": ["a", 1]}, {"pattern": "^b$"}]}, '"b"', "1"),
        (
            {
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            '{"b": 1}',
            "{}",
        ),
        (
            {
                "oneOf": [
                    {"$ref": "#/$defs/cat"},
                    {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
                ],
                "$defs": {
                    "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
                },
            },
            '{"kind": "dog"}',
            '{"kind": "cow"}',
        ),
    ],
)
def test_schemas_allow_valid_and_forbid_invalid_text(
    accepts: Callable[[GrammarSpec, str], bool], schema: Any, good: str, bad: str
):
    assert accepts(schema_spec(schema), good)
    assert not accepts(schema_spec(schema), bad)


def test_strings_with_a_length_limit_have_no_control_characters(accepts: Callable[[GrammarSpec, str], bool]):
    spec = schema_spec({"type": "string", "minLength": 2, "maxLength": 20})
    assert accepts(spec, '"a é"')
    assert not accepts(spec, '"a\tb"')
    assert not accepts(spec, '"a\x01b"')
    assert not accepts(spec, '"a\nb"')


def test_a_recursive_schema_can_be_written(accepts: Callable[[GrammarSpec, str], bool]):
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    assert accepts(schema_spec(tree), '{"children": [{"children": []}, {}]}')
    assert not accepts(schema_spec(tree), '{"children": [1]}')
    node = {
        "type": "object",
        "properties": {
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}], "default": None},
            "same": {"allOf": [{"$ref": "#/$defs/node"}], "description": "the same node"},
        },
    }
    linked = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    assert accepts(schema_spec(linked), '{"next": {"next": null}, "same": {"same": {}}}')
    assert not accepts(schema_spec(linked), '{"next": {"next": 1}}')


def doubled(times: int) -> dict[str, Any]:
    """Return a short schema that is huge with its references resolved."""
    schema: dict[str, Any] = {"$ref": "#/$defs/0", "$defs": {str(times): {"type": "integer"}}}
    for i in range(times):
        schema["$defs"][str(i)] = {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2}
    return schema


def nested(times: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(times):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "(a"),
        GrammarSpec("ebnf", "root ::= missing"),
        GrammarSpec("ebnf", "no grammar"),
        GrammarSpec("structural_tag", '{"type": "structural_tag", "format": {"type": "none"}}'),
        schema_spec({"type": "integer", "minimum": 10**30}),
        schema_spec({"type": "string", "minLength": 3, "maxLength": 2}),
        schema_spec({"type": "strin"}),
        schema_spec({"$ref": "#/$defs/missing"}),
        schema_spec({"$ref": "#"}),
        schema_spec({"allOf": [{"$ref": "#"}]}),
        schema_spec(False),
        schema_spec({"properties": ["a"]}),
        schema_spec({"type": 1, "anyOf": [{"type": "string"}]}),
        schema_spec({"type": "integer", "minimum": None}),
        schema_spec({"required": [{}], "allOf": [{"required": [1]}]}),
        schema_spec(doubled(30)),
        schema_spec(nested(900)),
    ],
)
def test_errors_contain_no_source_locations(grammars: XGrammars, spec: GrammarSpec):
    with pytest.raises(InvalidRequest) as refused:
        grammars.prepare(spec)
    assert refused.value.code == "invalid_grammar"
    assert not re.search(r"\.cc|\.h:|/project|\[\d\d:\d\d", refused.value.message), refused.value.message


def test_special_tokens_are_not_text(grammars: XGrammars, tokenizer: Tokenizer):
    spec = schema_spec({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    matcher = grammars.matcher(spec, tokenizer.encode('{"a": "some'))
    assert len(allowed_ids(matcher)) > VOCAB_SIZE // 2
    assert not set(allowed_ids(matcher).tolist()) & set(tokenizer.special_ids)


@pytest.mark.parametrize("max_tokens", [None, 40])
def test_a_matcher_rebuilt_from_the_output_continues_like_the_old_one(
    grammars: XGrammars, tokenizer: Tokenizer, max_tokens: int | None
):
    spec = schema_spec({"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}})
    ids, _ = written(grammars, spec, 40, seed=5)
    matcher = grammars.matcher(spec, [], max_tokens)
    for i, token_id in enumerate(ids):
        assert allowed_ids(matcher).tolist() == allowed_ids(grammars.matcher(spec, ids[:i], max_tokens)).tolist()
        matcher.accept(token_id)


MANY = {f"p{number}": {"type": "integer"} for number in range(2_001)}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "items": {"enum": [f"v{number}" for number in range(20_001)]}}, "enum values"),
        ({"anyOf": [{"enum": [f"{half} {number}" for number in range(10_001)]} for half in "ab"]}, "enum values"),
        (
            {"type": "object", "properties": {"a": {"type": "object", "properties": MANY}}},
            "/properties/a: it has more than 2000",
        ),
    ],
)
def test_a_schema_that_would_compile_for_minutes_is_rejected(schema: Any, named: str):
    with pytest.raises(InvalidRequest, match=named) as refused:
        enforceable(schema)
    assert refused.value.code == "invalid_grammar"


def test_a_schema_may_be_large():
    enforceable({"enum": [f"v{number}" for number in range(19_000)]})
    enforceable({"type": "object", "properties": MANY, "required": list(MANY)})


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (GrammarSpec("regex", "[a-z]+[0-9]{3}x"), "[a-z]+[0-9]{3}x"),
        (GrammarSpec("ebnf", 'root ::= "(" root ")" | [a-z]+'), r"\(*[a-z]+\)*"),
        (GrammarSpec("json_object"), r"\{.*\}"),
        (schema_spec({"type": "integer", "minimum": 1000}), "[0-9]{4,}"),
        (schema_spec({"type": "string", "minLength": 12}), '"[^"]{12,}"'),
        (schema_spec({"enum": ["one", "two", "a much longer text than the others"]}), '".*"'),
    ],
)
def test_any_grammar_completes_within_its_limit(
    grammars: XGrammars, tokenizer: Tokenizer, spec: GrammarSpec, pattern: str
):
    for seed in range(8):
        ids, done = written(grammars, spec, 32 + seed, seed)
        assert done
        assert re.fullmatch(pattern, tokenizer.decode(ids), re.DOTALL)


DOUBLING = "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "ab"'


@pytest.mark.parametrize("spec", [GrammarSpec("ebnf", DOUBLING), GrammarSpec("regex", "a{2147483647}")])
def test_forced_text_longer_than_memory_is_not_expanded(
    grammars: XGrammars, monkeypatch: pytest.MonkeyPatch, spec: GrammarSpec
):
    monkeypatch.setattr(
        xgrammar.GrammarMatcher, "find_jump_forward_string", lambda _: pytest.fail("expanded the forced text")
    )
    assert grammars.prepare(spec).first_ending is None
    ids, done = written(grammars, spec, 64, seed=0)
    assert (len(ids), done) == (64, False)


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ('{"name": "', r'\{"name": "[a-z]*"'),
        ("日本語", "日本語[あい]"),
        ("ab" * 40, "(ab){40}(c|d)?"),
        ("é" * 30, "é{30}=?"),
    ],
)
def test_forced_text_uses_the_longest_tokens(grammars: XGrammars, tokenizer: Tokenizer, text: str, expression: str):
    """One token per byte would make endings several times longer, and force them too early."""
    compiled = grammars.prepare(GrammarSpec("regex", expression))
    ending = compiled.endings.find(xgrammar.GrammarMatcher(compiled.grammar))
    assert ending is not None
    assert tokenizer.decode(ending).startswith(text)
    assert len(ending) <= len(tokenizer.encode(text)) + 8


PATTERNED = [
    ({"format": "email"}, "ann@example.org"),
    ({"format": "uri"}, "https://example.org/a?b=c,d"),
    ({"format": "hostname"}, "www.example.org"),
    ({"format": "date-time"}, "2026-11-16T03:50:09.123456Z"),
    ({"pattern": r"^\d+$"}, "0123456789"),
    ({"pattern": r"^\w+( \w+)*$"}, "some words"),
    ({"pattern": r"^[^@]+@[^@]+\.[a-z]+$"}, "ann@example.org"),
    ({"pattern": r"^[\w.-]+@[\w.-]+\.\w+$"}, "ann@example.org"),
    ({"pattern": r"^\$[0-9]+\.[0-9]{2}$"}, "$1234.56"),
]


@pytest.mark.parametrize(("keywords", "text"), PATTERNED, ids=[text for _, text in PATTERNED])
def test_a_pattern_is_not_steered_while_a_short_ending_fits(
    grammars: XGrammars, tokenizer: Tokenizer, keywords: dict[str, str], text: str
):
    """The search once needed 250 tokens for three mail addresses, so shorter limits forced the output from the start."""
    schema = {"type": "string", **keywords}
    whole = {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["a", "b"]}
    ids = tokenizer.encode(json.dumps({"a": text, "b": text}))
    matcher = grammars.matcher(schema_spec(whole), [], len(ids) + 48)
    for token_id in ids:
        assert token_id in allowed_ids(matcher)
        assert matcher.accept(token_id)


@pytest.mark.parametrize(("keywords", "text"), PATTERNED, ids=[text for _, text in PATTERNED])
def test_a_pattern_completes_in_time(grammars: XGrammars, tokenizer: Tokenizer, keywords: dict[str, str], text: str):
    spec = schema_spec({"type": "array", "items": {"type": "string", **keywords}, "minItems": 1})
    begun = tokenizer.encode(json.dumps([text] * 20))[:48]
    matcher, ids = grammars.matcher(spec, [], 96), []
    while not matcher.done and len(ids) < 96:
        allowed = allowed_ids(matcher)
        wanted = begun[len(ids)] if len(ids) < len(begun) and begun[len(ids)] in allowed else allowed[-1]
        ids.append(int(wanted))
        assert matcher.accept(ids[-1])
    assert matcher.done
    jsonschema.validate(json.loads(tokenizer.decode(ids)), json.loads(spec.text))


def test_the_search_for_an_ending_has_a_time_limit(grammars: XGrammars, monkeypatch: pytest.MonkeyPatch):
    """The search blocks the engine's thread. Without the limit, this regex took 40 s at a single token."""
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        grammars.prepare(GrammarSpec("regex", r"(\w+\s?)*x"))
    spec = schema_spec({"type": "array", "items": {"type": "integer"}})
    grammars.prepare(spec)
    monkeypatch.setattr(endings, "_MAX_SEARCH_S", -1.0)
    matcher = grammars.matcher(spec, [], 8)
    assert matcher.accept(allowed_ids(matcher)[-1])
    assert matcher.too_slow


def test_a_grammar_with_slow_matching_is_marked_too_slow(grammars: XGrammars):
    hard, usual = (
        grammars.matcher(GrammarSpec("regex", "(([a-z]*){30}){30}"), []),
        grammars.matcher(schema_spec({}), []),
    )
    for matcher in (hard, usual):
        for _ in range(8):
            if not matcher.done and not matcher.too_slow:
                assert matcher.accept(allowed_ids(matcher)[-1])
    assert (hard.too_slow, usual.too_slow) == (True, False)


def test_output_is_cut_off_if_no_complete_output_fits(grammars: XGrammars):
    spec = schema_spec({"const": "a text that takes more tokens than there are"})
    ids, done = written(grammars, spec, 4, seed=0)
    assert (len(ids), done) == (4, False)


def test_far_from_the_limit_every_token_is_allowed(grammars: XGrammars, tokenizer: Tokenizer):
    spec = GrammarSpec("json_object")
    ids = tokenizer.encode('{"a": [1, 2, "some text')
    free, counted = grammars.matcher(spec, ids), grammars.matcher(spec, ids, 4096)
    assert allowed_ids(free).tolist() == allowed_ids(counted).tolist()


def test_several_threads_can_prepare(tokenizer: Tokenizer):
    grammars = XGrammars(tokenizer, VOCAB_SIZE)
    specs = [schema_spec({"type": "string", "enum": [f"value {i % 6}"]}) for i in range(24)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(grammars.prepare, specs))
        counts = list(threads.map(lambda spec: len(allowed_ids(grammars.matcher(spec, []))), specs))
    assert len(set(counts)) == 1


def test_a_grammar_in_use_is_not_compiled_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    """With more open requests than cached grammars, the engine's thread must still not compile."""
    monkeypatch.setattr(grammar_cache, "_MAX_RECENT", 1)
    grammars = XGrammars(tokenizer, VOCAB_SIZE)
    specs = [GrammarSpec("regex", f"a{{{i}}}") for i in range(1, 8)]
    kept = [grammars.prepare(spec) for spec in specs]
    monkeypatch.setattr(grammars, "_compile", lambda spec: pytest.fail(f"{spec} was compiled again"))
    for spec in specs:
        grammars.matcher(spec, [])
    kept.clear()
    assert len(grammars._cache._alive) == 1


def test_old_grammars_are_dropped_and_compiled_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_cache, "_MAX_RECENT", 4)
    grammars = XGrammars(tokenizer, VOCAB_SIZE)
    specs = [GrammarSpec("regex", f"a{{{i}}}") for i in range(1, 8)]
    for spec in specs:
        grammars.prepare(spec)
    assert len(grammars._cache._alive) == 4
    for length, spec in enumerate(specs, 1):
        ids, done = written(grammars, spec, 32, seed=0)
        assert done
        assert tokenizer.decode(ids) == "a" * length


def test_the_cache_of_large_grammars_is_limited_in_bytes(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    """256 grammars with thousands of enum values each would take 15 GB."""
    grammars = XGrammars(tokenizer, VOCAB_SIZE)
    specs = [schema_spec({"enum": [f"{i} {number}" for number in range(200)]}) for i in range(6)]
    size = grammars.prepare(specs[0]).num_bytes
    monkeypatch.setattr(grammar_cache, "_MAX_RECENT_BYTES", int(2.5 * size))
    for spec in [*specs, specs[-1]]:
        grammars.prepare(spec)
    assert list(grammars._cache._recent) == specs[-2:]
    assert len(grammars._cache._alive) == 2
    asked_for = grammars.prepare(schema_spec({"enum": [str(number) for number in range(2_000)]}))
    assert asked_for.num_bytes > 2.5 * size
    assert not grammars._cache._recent
    assert list(grammars._cache._alive.values()) == [asked_for]
