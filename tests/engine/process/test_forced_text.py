"""The tokens that a grammar forces, with SmolLM2's vocabulary: how many of them a draft can rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import xgrammar

from stoker.engine.process.grammars import forced_text
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.sched.request import GrammarSpec
from stoker.text.parsers.grammar import structural_tag
from stoker.text.parsers.tools.hermes import HermesParser
from stoker.text.tokenizer import Tokenizer

VOCAB_SIZE = 49152
WEATHER = {
    "type": "object",
    "properties": {
        "name": {"const": "get_weather"},
        "arguments": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}'


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> XGrammars:
    return XGrammars(tokenizer, VOCAB_SIZE)


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found must not depend on how busy the machine is."""
    monkeypatch.setattr(forced_text, "_MAX_SEARCH_S", 60.0)


def test_a_forced_call_needs_few_steps(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    """The text between the model's own choices is drafted exactly as the model writes it."""
    matcher = grammars.matcher(GrammarSpec("json_schema", json.dumps(WEATHER)), [])
    ids = [*tokenizer.encode(CALL), tokenizer.eos_token_ids[0]]
    position = num_steps = 0
    while position < len(ids):
        drafts = matcher.forced(64)
        num_accepted = 0
        for draft, token_id in zip(drafts, ids[position:], strict=False):
            if draft != token_id:
                break
            num_accepted += 1
        assert num_accepted == len(drafts)
        for token_id in ids[position : position + num_accepted + 1]:
            assert matcher.accept(token_id)
        position += num_accepted + 1
        num_steps += 1
    assert matcher.done
    assert num_steps <= 5 < len(ids) / 5


@pytest.mark.parametrize(
    ("arguments", "num_steps"),
    [
        ('{"city": "Paris", "unit": "celsius"}', 5),
        ('{"city": "Paris", "unit": "celsius", "days": [1, 2]}', 11),
    ],
)
def test_a_forced_call_with_free_white_space_needs_few_steps(
    grammars: XGrammars, tokenizer: Tokenizer, arguments: str, num_steps: int
) -> None:
    """Tool formats allow any white space in the arguments. Drafts have it where models write it."""
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city", "unit"],
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    matcher = grammars.matcher(structural_tag(HermesParser.calls([tool], parallel=False)), [])
    text = HermesParser.render([("get_weather", arguments)])
    ids = [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
    position = found = 0
    while position < len(ids):
        drafts = matcher.forced(64)
        assert all(0 <= draft < VOCAB_SIZE for draft in drafts)
        pairs = zip(drafts, ids[position:], strict=False)
        num_accepted = next((i for i, (draft, token_id) in enumerate(pairs) if draft != token_id), len(drafts))
        for token_id in ids[position : position + num_accepted + 1]:
            assert matcher.accept(token_id)
        position += num_accepted + 1
        found += 1
    assert found <= num_steps < len(ids) / 2


TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}


def forced_after(grammars: XGrammars, token_ids: list[int]) -> list[int]:
    """What is forced after these tokens of a call, whose arguments may have any white space."""
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": TOOL}}
    return grammars.matcher(structural_tag(HermesParser.calls([tool], parallel=False)), token_ids).forced(64)


@pytest.mark.parametrize("indent", ["\n  ", "\n    ", "\n        "])
def test_the_last_space_of_an_indentation_is_part_of_the_next_token(
    grammars: XGrammars, tokenizer: Tokenizer, indent: str
) -> None:
    """The tokenizer writes `   "` as two spaces and ` "`. After the first of these, the draft has the second."""
    text = HermesParser.render([("get_weather", f'{{{indent}"city": "Paris"')]).split("Paris")[0]
    ids = tokenizer.encode(text)
    place = next(i for i, token_id in enumerate(ids) if tokenizer.token_bytes(token_id) == indent[:-1].encode())
    assert forced_after(grammars, ids[: place + 1]) == ids[place + 1 :]


def test_a_line_break_without_indentation_is_not_lengthened(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    text = HermesParser.render([("get_weather", '{\n"city": "Paris"')]).split('"city')[0]
    assert forced_after(grammars, tokenizer.encode(text)) == tokenizer.encode('"city": "')


def test_the_first_closing_bracket_on_a_new_line_is_a_token_of_its_own(
    grammars: XGrammars, tokenizer: Tokenizer
) -> None:
    arguments = '{"city": "Paris",\n"unit": "celsius"'
    text = HermesParser.render([("get_weather", arguments)]).rpartition("}")[0]
    for line_break in ("\n", "\n  "):
        found = forced_after(grammars, tokenizer.encode(text + line_break))
        first, second = (tokenizer.token_bytes(token_id).strip() for token_id in found[:2])
        assert first == b"}"
        assert second.startswith(b"}")
    found = forced_after(grammars, tokenizer.encode(text))
    assert tokenizer.token_bytes(found[0]).startswith(b"}}")


def test_the_forced_beginning_is_known_before_any_output(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    spec = GrammarSpec("json_schema", json.dumps(WEATHER))
    assert list(grammars.forced_start(spec)) == tokenizer.encode(CALL[: CALL.index("Paris")])
    assert list(grammars.forced_start(spec)) == grammars.matcher(spec, []).forced(64)
    assert not grammars.forced_start(GrammarSpec("regex", "yes|no"))
    assert len(grammars.forced_start(GrammarSpec("regex", "(abc, ){400}"))) == 64


def test_asking_changes_nothing(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    spec = GrammarSpec("json_schema", json.dumps(WEATHER))
    asked, silent = grammars.matcher(spec, []), grammars.matcher(spec, [])
    masks = torch.zeros(2, VOCAB_SIZE // 32, dtype=torch.int32)
    for token_id in tokenizer.encode(CALL):
        assert asked.forced(8) == asked.forced(8)
        asked.fill(masks[0])
        silent.fill(masks[1])
        assert torch.equal(masks[0], masks[1])
        assert asked.accept(token_id)
        assert silent.accept(token_id)


@pytest.mark.parametrize("max_tokens", [1, 3, 64])
def test_no_more_tokens_are_returned_than_asked_for(grammars: XGrammars, max_tokens: int) -> None:
    matcher = grammars.matcher(GrammarSpec("regex", "(abc, ){400}"), [])
    assert len(matcher.forced(max_tokens)) == max_tokens


def test_a_choice_forces_nothing(grammars: XGrammars) -> None:
    assert grammars.matcher(GrammarSpec("regex", "[a-z]+"), []).forced(8) == []
    assert grammars.matcher(GrammarSpec("regex", "yes|no"), []).forced(8) == []


def test_another_way_to_write_the_text_is_followed(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    """The sampled token may be shorter than the tokenizer's own. What is left is found anew."""
    matcher = grammars.matcher(GrammarSpec("regex", "weather=(1|2)"), [])
    assert tokenizer.decode(matcher.forced(8)) == "weather="
    assert matcher.accept(tokenizer.encode("we")[0])
    assert tokenizer.decode(matcher.forced(8)) == "ather="


@pytest.mark.parametrize("text", ["日本語", "naïve café", "🙂🙂"])
def test_text_of_several_bytes_per_character_is_found(grammars: XGrammars, tokenizer: Tokenizer, text: str) -> None:
    matcher = grammars.matcher(GrammarSpec("regex", f"{text}(a|b)"), [])
    assert matcher.forced(64) == tokenizer.encode(text)


def test_an_ending_that_must_begin_now_is_forced(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    """Near its limit the matcher allows only the tokens of an ending."""
    spec = GrammarSpec("json_schema", json.dumps({"type": "array", "items": {"type": "string"}}))
    matcher = grammars.matcher(spec, tokenizer.encode('["a'), max_tokens=6)
    forced = matcher.forced(8)
    assert forced[-1] == tokenizer.eos_token_ids[0]
    for token_id in forced:
        allowed = torch.zeros(VOCAB_SIZE // 32, dtype=torch.int32)
        matcher.fill(allowed)
        assert int(allowed[token_id >> 5]) >> (token_id & 31) & 1
        assert matcher.accept(token_id)
    assert matcher.done
    assert matcher.forced(8) == []


def test_text_longer_than_memory_is_not_expanded(grammars: XGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        xgrammar.GrammarMatcher, "find_jump_forward_string", lambda _: pytest.fail("expanded the forced text")
    )
    assert len(grammars.matcher(GrammarSpec("regex", "a{2147483647}"), []).forced(16)) <= 16
