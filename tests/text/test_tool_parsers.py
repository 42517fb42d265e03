"""Tool parsers neither lose nor repeat text at any chunk border, and read what their grammars force."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.text.parsers.contract import TOOL_PARSERS, Delta, TextDelta, ToolArgumentsDelta, ToolCallStart
from stoker.text.parsers.json_stream import CallObject

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["query"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
SEARCH = '{"query": "say \\"}{\\" ü", "days": 3}'

# How each format writes calls (name, arguments) and what it puts around all of them.
WRITTEN = {
    "hermes": lambda calls: "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
    ),
    "llama3_json": lambda calls: "; ".join(
        f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls
    ),
    "kimi_k2": lambda calls: (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            for index, (name, arguments) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    ),
    "deepseek_v3": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
}
FORMATS = sorted(WRITTEN)
ENDING = {*b'"}', 256}  # bytes that bring a call to its end, and the end of the answer
CALLS = [("search", SEARCH), ("now", "{}")]


def _parse(name: str, chunks: list[str]) -> list[Delta]:
    parser = TOOL_PARSERS.get(name)(TOOLS)
    deltas = [delta for chunk in chunks for delta in parser.push(chunk)]
    return deltas + parser.flush()


def _whole(deltas: list[Delta]) -> list[tuple[str, ...]]:
    """Texts and calls in order, with what was streamed joined and call ids left out."""
    whole: list[tuple[str, ...]] = []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            joined = whole[-1][1] if whole and whole[-1][0] == "text" else None
            whole[len(whole) - (joined is not None) :] = [("text", (joined or "") + delta.text)]
        elif isinstance(delta, ToolCallStart):
            assert delta.index == sum(kind == "call" for kind, *_ in whole)
            whole.append(("call", delta.name, ""))
        else:
            kind, called, arguments = whole[-1]
            whole[-1] = (kind, called, arguments + delta.text)
    return whole


def _chunks(text: str, seed: int) -> list[str]:
    dice = random.Random(seed)
    chunks, at = [], 0
    while at < len(text):
        size = dice.choice([1, 1, 2, 3, 7, 40])
        chunks.append(text[at : at + size])
        at += size
    return chunks


def test_every_registered_parser_is_tested() -> None:
    assert list(TOOL_PARSERS) == FORMATS
    assert all(TOOL_PARSERS.get(name).name == name for name in TOOL_PARSERS)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_come_out_as_written(name: str) -> None:
    expected = [("call", "search", SEARCH), ("call", "now", "{}")]
    for seed in range(20):
        assert _whole(_parse(name, _chunks(WRITTEN[name](CALLS), seed))) == expected
    starts = [delta for delta in _parse(name, [WRITTEN[name](CALLS)]) if isinstance(delta, ToolCallStart)]
    assert [start.index for start in starts] == [0, 1]
    assert len({start.call_id for start in starts}) == (2 if name == "kimi_k2" else 1)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"llama3_json"}))
def test_text_around_calls_passes_through(name: str) -> None:
    text = f"Let me look. \n\n{WRITTEN[name](CALLS)}\n\nThat is it.\n"
    expected = [("text", "Let me look."), ("call", "search", SEARCH), ("call", "now", "{}"), ("text", "That is it.\n")]
    for seed in range(20):
        assert _whole(_parse(name, _chunks(text, seed))) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_stream_as_they_come(name: str) -> None:
    parser = TOOL_PARSERS.get(name)(TOOLS)
    written = WRITTEN[name]([("search", SEARCH)])
    half = written.index("say")
    deltas = parser.push(written[: half + 3])
    assert isinstance(deltas[0], ToolCallStart)
    assert "".join(d.text for d in deltas if isinstance(d, ToolArgumentsDelta)) == '{"query": "say'


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_call_is_not_lost(name: str) -> None:
    written = "Hm: " + WRITTEN[name](CALLS) if name != "llama3_json" else WRITTEN[name](CALLS)
    for end in range(len(written)):
        whole = _whole(_parse(name, [written[:end]]))
        started = [part for part in whole if part[0] == "call"]
        if not started:
            assert "".join(part[1] for part in whole) == written[:end]
        else:
            assert written[written.index(SEARCH) :].startswith(started[0][2])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text", ["", " ", "plain\n", "a < b <", "{", '{"name": 3}', '{"a": 1}', "<tool_call", "\n\n x \n"]
)
def test_text_that_is_not_a_call_is_text(name: str, text: str) -> None:
    for chunks in ([text], list(text)):
        assert "".join(part[1] for part in _whole(_parse(name, chunks))) == text


pieces = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.search:0"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁sep｜>", "function", "search", "\n```json\n", "\n```", "<", "<|tool", '{"name": "search", '),
        *('{"name": "other", ', '"arguments": ', '"parameters": ', '{"query": "x"}', "{}", "null", '"{\\"q\\": 1}"'),
        *("}", "{", "[", "]", '"', "\\", ",", ";", ":", " ", "\n", "word", "é"),
        *(WRITTEN[name](CALLS) for name in FORMATS),
    ]
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=120, deadline=None, print_blob=True)
@given(parts=st.lists(pieces, max_size=14), seed=st.integers(0, 10**6))
def test_chunk_borders_do_not_change_the_result(name: str, parts: list[str], seed: int) -> None:
    text = "".join(parts)
    whole = _whole(_parse(name, [text]))
    assert _whole(_parse(name, _chunks(text, seed))) == whole
    assert _whole(_parse(name, list(text))) == whole
    if not any(part[0] == "call" for part in whole):
        assert "".join(part[1] for part in whole) == text


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"arguments": {"query": "x"}, "name": "search"}', '{"query": "x"}'),
        ('{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}', '{"query": "x"}'),
        ('{"name": "search", "arguments": "{\\"query\\": \\"\\ud83d\\"}"}', '{"query": "?"}'),
        ('{"name": "search", "arguments": null}', "{}"),
        ('{"name": "search"}', "{}"),
        ('{"name": "search", "arguments": {"a": 1}, "arguments": {"b": 2}, "name": "now"}', '{"a": 1}'),
        ('{"id": [1, {"a": 2}], "name": "search", "arguments": {}, "more": -1.5e3}', "{}"),
    ],
)
def test_objects_in_other_shapes(written: str, arguments: str) -> None:
    assert _whole(_parse("hermes", list(f"<tool_call>{written}</tool_call>"))) == [("call", "search", arguments)]
    assert _whole(_parse("llama3_json", list(written))) == [("call", "search", arguments)]


def test_a_call_without_a_closing_mark_is_read() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n'
    assert _whole(_parse("hermes", list(call + call))) == [("call", "now", "{}")] * 2


def test_llama_calls_only_the_requests_tools() -> None:
    other = '{"name": "Bob", "parameters": {"age": 3}}'
    assert _whole(_parse("llama3_json", list(other))) == [("text", other)]
    tagged = '<|python_tag|>{"name": "now", "parameters": {}}'
    assert _whole(_parse("llama3_json", list("Well. " + tagged))) == [("text", "Well."), ("call", "now", "{}")]
    code = "<|python_tag|>print(1)"
    assert _whole(_parse("llama3_json", list(code))) == [("text", code)]


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("hermes", '<tool_call>{"a": ['),
        ("llama3_json", '<|python_tag|>{"a": ['),
        ("llama3_json", '<|python_tag|>{"name": "now"}; {"a": ['),
        ("llama3_json", '<|python_tag|>{"name": "other", "a": ['),
    ],
)
def test_many_incomplete_calls_are_not_read_quadratically(
    name: str, beginning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed, feed = 0, CallObject.feed

    def counted(call: CallObject, text: str) -> int:
        nonlocal fed
        taken = feed(call, text)
        fed += taken
        return taken

    monkeypatch.setattr(CallObject, "feed", counted)
    chunks = ['{"a": [', *[beginning] * 2000]
    whole = _whole(_parse(name, chunks))
    assert fed < 1_000_000
    assert _whole(_parse(name, ["".join(chunks)])) == whole


def test_a_call_is_found_inside_text_that_looked_like_one() -> None:
    written = '<tool_call>{"a": [' * 20 + WRITTEN["hermes"](CALLS[:1])
    assert _whole(_parse("hermes", [written])) == [("text", '<tool_call>{"a": [' * 20), ("call", "search", SEARCH)]


def test_kimi_keeps_its_call_ids() -> None:
    deltas = _parse("kimi_k2", [WRITTEN["kimi_k2"](CALLS)])
    assert [d.call_id for d in deltas if isinstance(d, ToolCallStart)] == ["functions.search:0", "functions.now:1"]


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info)


def _accepts(compiler: xgrammar.GrammarCompiler, name: str, text: str, parallel: bool) -> bool:
    spec = TOOL_PARSERS.get(name).grammar(TOOLS, parallel=parallel)
    assert spec.kind == "structural_tag"
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(spec.text))
    return matcher.accept_string(text) and matcher.accept_token(256)


@pytest.mark.parametrize("name", FORMATS)
def test_the_grammar_forces_a_valid_call(compiler: xgrammar.GrammarCompiler, name: str) -> None:
    write = WRITTEN[name]
    one, two = write([("search", '{"query": "x"}')]), write([("search", '{"query": "x"}'), ("now", '{"any": 1}')])
    assert _accepts(compiler, name, one, parallel=False)
    assert _accepts(compiler, name, one, parallel=True)
    assert _accepts(compiler, name, two, parallel=True)
    assert not _accepts(compiler, name, two, parallel=False)
    for wrong in (
        "",
        "Sure!",
        write([("other", "{}")]),
        write([("search", "{}")]),
        write([("search", '{"query": 3}')]),
    ):
        assert not _accepts(compiler, name, wrong, parallel=True)


@pytest.mark.parametrize("name", FORMATS)
def test_the_parser_reads_all_that_the_grammar_allows(compiler: xgrammar.GrammarCompiler, name: str) -> None:
    spec = TOOL_PARSERS.get(name).grammar(TOOLS, parallel=True)
    compiled = compiler.compile_structural_tag(spec.text)
    bitmask = xgrammar.allocate_token_bitmask(1, 257)
    finished = 0
    for seed in range(12):
        dice, matcher, written = random.Random(seed), xgrammar.GrammarMatcher(compiled), bytearray()
        while not matcher.is_terminated() and len(written) < 400:
            matcher.fill_next_token_bitmask(bitmask)
            words = bitmask[0].tolist()
            # Closing characters are likelier than chance would have them: most calls then end.
            allowed = [t for t in range(257) if words[t // 32] >> (t % 32) & 1]
            allowed = [t for t in allowed if t < 128 or t == 256] or allowed
            token = dice.choice([t for t in allowed if t in ENDING or dice.random() < 0.1] or allowed)
            assert matcher.accept_token(token)
            written += bytes([token]) if token < 256 else b""
        if matcher.is_terminated():
            finished += 1
            whole = _whole(_parse(name, [written.decode()]))
            assert whole
            for kind, called, arguments in whole:
                assert kind == "call"
                assert called in ("search", "now")
                assert isinstance(json.loads(arguments), dict)
    assert finished >= 3
