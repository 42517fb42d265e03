"""Strict tool calls under tool_choice "auto", with SmolLM2's vocabulary: text is free, calls fit, text may be cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer

from stoker.base.ids import RequestId
from stoker.engine.process.grammars.compile_cost import is_cheap_to_compile
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.sched.request import GrammarSpec
from stoker.text.parsers.contract import REASONING_PARSERS, TOOL_PARSERS, ToolArgumentsDelta
from stoker.text.parsers.grammar import schema, structural_tag
from stoker.text.parsers.reasoning.think import ThinkParser
from stoker.text.parsers.tools.hermes import HermesParser
from stoker.text.tokenizer import Tokenizer

VOCAB_SIZE = 49152
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
FREE = structural_tag(HermesParser.text_and_calls(TOOLS, parallel=True), allows_text=True)
TEXT = 'A text, with [brackets], {braces},\tand a tab: "x".\n' * 4


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> XGrammars:
    return XGrammars(tokenizer, VOCAB_SIZE)


def allowed_ids(matcher: Any) -> list[int]:
    mask = torch.zeros(VOCAB_SIZE // 32, dtype=torch.int32)
    matcher.fill(mask)
    found: list[int] = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")).tolist()
    return found


@pytest.mark.parametrize("tool", list(TOOL_PARSERS))
def test_no_trial_is_needed_for_our_own_formats(tool: str) -> None:
    content = ThinkParser.before(TOOL_PARSERS.get(tool).text_and_calls(TOOLS, parallel=True), starts_inside=False)
    assert is_cheap_to_compile(structural_tag(content, allows_text=True))
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": pattern}}]
    content = TOOL_PARSERS.get(tool).text_and_calls(tools, parallel=True)
    assert not is_cheap_to_compile(structural_tag(content, allows_text=True))


def test_the_token_limit_cuts_free_text_anywhere(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    """Near the limit, a forced call is completed. Text must neither end early nor lose its commas and brackets."""
    ids = tokenizer.encode(TEXT)
    matcher = grammars.matcher(FREE, [], len(ids))
    for token_id in ids:
        assert token_id in allowed_ids(matcher)
        assert not matcher.forced(8)
        assert matcher.accept(token_id)
    assert not matcher.done


def test_a_call_is_completed_before_the_token_limit(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    begun = tokenizer.encode('Sure. <tool_call>\n{"name": "weather", "arguments": {"city": "Par')
    matcher = grammars.matcher(FREE, begun, len(begun) + 40)
    filler, written = tokenizer.encode("is")[0], list(begun)
    for _ in range(40):
        allowed = allowed_ids(matcher)
        token_id = filler if filler in allowed else allowed[0]
        assert matcher.accept(token_id)
        written.append(token_id)
        if matcher.done:
            break
    parser = HermesParser(TOOLS)
    deltas = [*parser.push(tokenizer.decode(written)), *parser.flush()]
    arguments = "".join(delta.text for delta in deltas if isinstance(delta, ToolArgumentsDelta))
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_drafts_of_forced_text_begin_at_the_opening_tag(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(FREE, tokenizer.encode("Sure. <tool_call>"), 200)
    forced = tokenizer.decode(matcher.forced(16))
    assert forced.startswith('\n{"name": "weather", "arguments":')


def test_a_resumed_answer_is_held_like_a_whole_one(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HermesParser.render([("weather", '{"city": "Rome", "days": 3}')]) + "\nDone.")
    for cut in range(len(ids)):
        resumed, whole = grammars.matcher(FREE, ids[:cut], 100), grammars.matcher(FREE, [], 100)
        for token_id in ids[:cut]:
            assert whole.accept(token_id)
        assert allowed_ids(resumed) == allowed_ids(whole)


def test_reasoning_may_write_anything(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    content = ThinkParser.before(HermesParser.text_and_calls(TOOLS, parallel=True), starts_inside=True)
    spec = structural_tag(content, allows_text=True)
    end = tokenizer.eos_token_ids[0]

    def accepts(text: str) -> bool:
        matcher = grammars.matcher(spec, [], 500)
        return all(matcher.accept(token_id) for token_id in [*tokenizer.encode(text), end])

    call = HermesParser.render([("weather", '{"city": "Rome", "days": 3}')])
    assert accepts(f"I could write <tool_call>nonsense.\n</think>\n\n{call}")
    assert accepts("I could write <tool_call>nonsense")
    assert not accepts("Well.\n</think>\n\n<tool_call>nonsense")


def test_a_call_of_harmony_ends_with_a_stop_token(smollm2: Path) -> None:
    """gpt-oss ends a call with a special token that is also a stop token, and its other marks are special tokens, too."""
    raw = RawTokenizer.from_file(str(smollm2 / "tokenizer.json"))
    marks = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>")
    raw.add_special_tokens(list(marks))
    ends = [raw.token_to_id("<|return|>"), raw.token_to_id("<|call|>")]
    tokenizer = Tokenizer(raw, eos_token_ids=ends)
    grammars = XGrammars(tokenizer, tokenizer.vocab_size)
    parser, reasoning = TOOL_PARSERS.get("harmony"), REASONING_PARSERS.get("harmony")
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome", "days": 3}'
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    forced = structural_tag(reasoning.before(parser.calls(TOOLS, parallel=False), False), allows_text=True)
    free = structural_tag(reasoning.before(parser.text_and_calls(TOOLS, parallel=False), False), allows_text=True)
    form = structural_tag(reasoning.before(schema(SCHEMA), False), allows_text=True)

    def accepts(spec: GrammarSpec, text: str, end: int) -> bool:
        matcher = grammars.matcher(spec, [], 500)
        return all(matcher.accept(token_id) for token_id in [*tokenizer.encode(text), end]) and matcher.done

    for text in (call, thought + call):
        assert accepts(forced, text, ends[1])
        assert accepts(free, text, ends[1])
        assert not accepts(free, text.replace("3}", '"3"}'), ends[1])
    assert accepts(free, f"{thought}<|channel|>final<|message|>Sunny.", ends[0])
    assert not accepts(forced, f"{thought}<|channel|>final<|message|>Sunny.", ends[0])
    final = '<|channel|>final<|message|>{"city": "Rome", "days": 3}'
    assert accepts(form, thought + final, ends[0])
    assert not accepts(form, f"{thought}<|channel|>final<|message|>Sunny.", ends[0])


def test_a_spec_survives_the_pipe() -> None:
    import msgspec

    from stoker.sched.request import GenerateRequest, SamplingParams

    request = GenerateRequest(RequestId("a"), [1], 1, SamplingParams(grammar=FREE), 5)
    encoded = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(encoded, type=GenerateRequest).sampling.grammar == FREE
    assert isinstance(FREE, GrammarSpec)
    assert FREE.allows_text
