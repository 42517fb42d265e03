"""What every registered tool parser and reasoning parser must hold. A new parser is tested without an edit here.

The text to parse comes from the parser's own `render`.
"""

from __future__ import annotations

import json
import random
import re

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import CALLS, SEARCH, TOOLS, joined, parse_calls, parse_reasoning, random_chunks

from stoker.base.registry import Registry
from stoker.sched.request import TextGrammar
from stoker.text.parsers import grammar
from stoker.text.parsers.contract import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ReasoningParser,
    ToolArgumentsDelta,
    ToolCallStart,
    ToolParser,
    find_format,
)

END = 256  # the token id of the end of the answer; the other ids are bytes
CLOSING = {*b'"}', END}  # tokens that bring a call to its end
BEFORE, AFTER = "Let me look.", "That is it.\n"
REASONING, TEXT = "Two and two?\n\nFour.", "It is 4.\n"

# White space, marks such as <tool_call>, words, and single characters.
_FRAGMENT = re.compile(r"\s+|<[^<>\s]+>|[\w.:]+|.", re.DOTALL)
_JSON_FRAGMENTS = [
    *('{"name": "search", ', '{"name": "other", ', '"arguments": ', '"parameters": ', '{"query": "x"}', "{}", "null"),
    *('"{\\"q\\": 1}"', "}", "{", "[", "]", '"', "\\", ",", ";", ":", " ", "\n", "<", "<|tool", "word", "é"),
]


def _declared(registry: Registry[type[ToolParser]] | Registry[type[ReasoningParser]], name: str) -> None:
    """Fail with the names of all members that the parser does not declare."""
    parser = registry.get(name)
    missing = sorted(parser.__abstractmethods__)
    missing += [] if hasattr(parser, "needs_special_tokens") else ["needs_special_tokens"]
    if missing:
        pytest.fail(
            f"the parser {name!r} ({parser.__module__}.{parser.__name__}) does not declare: {', '.join(missing)}. "
            f"stoker/text/parsers/contract.py says what each of them means"
        )


@pytest.fixture(params=list(TOOL_PARSERS))
def tool(request: pytest.FixtureRequest) -> str:
    """The name of a tool parser."""
    _declared(TOOL_PARSERS, request.param)
    return str(request.param)


@pytest.fixture(params=list(REASONING_PARSERS))
def think(request: pytest.FixtureRequest) -> str:
    """The name of a reasoning parser."""
    _declared(REASONING_PARSERS, request.param)
    return str(request.param)


def _render(tool: str, calls: list[tuple[str, str]] = CALLS) -> str:
    return TOOL_PARSERS.get(tool).render(calls)


def _same_calls(tool: str, whole: list[tuple[str, ...]], expected: list[tuple[str, ...]]) -> bool:
    """Compare the arguments as text if the format writes them as JSON, otherwise by their values."""
    if SEARCH in _render(tool):
        return whole == expected

    def values(parts: list[tuple[str, ...]]) -> list[tuple[object, ...]]:
        return [(kind, *rest[:-1], json.loads(rest[-1])) if kind == "call" else (kind, *rest) for kind, *rest in parts]

    return values(whole) == values(expected)


def _fragments(text: str) -> list[str]:
    return sorted(set(_FRAGMENT.findall(text)))


def test_the_grammar_of_a_custom_tool_is_enforced_where_its_input_is_written(tool: str) -> None:
    parser, given = TOOL_PARSERS.get(tool), TextGrammar("regex", "[xy]+")
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    custom = {"type": "function", "function": {"name": "edit", "parameters": text}, "input_grammar": given}
    written = parser.render([("edit", '{"input": "xy"}')])
    for content in (parser.calls([custom], parallel=False), parser.text_and_calls([custom], parallel=True)):
        inputs = grammar.structural_tag(content).inputs
        assert inputs, "`call_tags` must call `functions` or `custom_input` of stoker/text/parsers/grammar.py"
        for one in inputs:
            assert one.grammar == given
            assert one.begin in written
            assert f"{one.opening}xy{one.end}" in written[written.index(one.begin) + len(one.begin) :]


def test_calls_come_out_as_rendered(tool: str) -> None:
    expected = [("call", *call) for call in CALLS]
    for seed in range(20):
        assert _same_calls(tool, joined(parse_calls(tool, random_chunks(_render(tool), seed))), expected)
    starts = [delta for delta in parse_calls(tool, [_render(tool)]) if isinstance(delta, ToolCallStart)]
    assert [start.index for start in starts] == [0, 1]
    ids = [start.call_id for start in starts]
    assert ids == ["", ""] or len({*ids, ""}) == 3, "either no call has an id, or each has its own"


def test_text_around_calls_passes_through(tool: str) -> None:
    calls = [("call", *call) for call in CALLS]
    expected = [*calls, ("text", AFTER)]
    for seed in range(20):
        chunks = random_chunks(f"{_render(tool)}\n\n{AFTER}", seed)
        assert _same_calls(tool, joined(parse_calls(tool, chunks)), expected)
        if TOOL_PARSERS.get(tool).reads_calls_after_text:
            chunks = random_chunks(f"{BEFORE} \n\n{_render(tool)}\n\n{AFTER}", seed)
            assert _same_calls(tool, joined(parse_calls(tool, chunks)), [("text", BEFORE), *expected])


def test_a_call_streams_before_it_is_complete(tool: str) -> None:
    parser = TOOL_PARSERS.get(tool)(TOOLS)
    written = _render(tool, CALLS[:1])
    half = written.index("say") + len("say")
    deltas = parser.push(written[:half])
    assert [type(delta) for delta in deltas[:1]] == [ToolCallStart], "a call starts as soon as its function is known"
    if SEARCH in written:
        assert "".join(d.text for d in deltas if isinstance(d, ToolArgumentsDelta)) == '{"query": "say'


def test_a_truncated_call_is_not_lost(tool: str) -> None:
    written = _render(tool)
    if TOOL_PARSERS.get(tool).reads_calls_after_text:
        written = f"Hm: {written}"
    for end in range(len(written)):
        whole = joined(parse_calls(tool, [written[:end]]))
        started = [part for part in whole if part[0] == "call"]
        if not started:
            assert "".join(part[1] for part in whole) == written[:end]
        elif SEARCH in written:
            assert written[written.index(SEARCH) :].startswith(started[0][2])


@pytest.mark.parametrize(
    "text", ["", " ", "plain\n", "a < b <", "{", '{"name": 3}', '{"a": 1}', "<tool_call", "\n\n x \n"]
)
def test_text_that_is_not_a_call_is_text(tool: str, text: str) -> None:
    for chunks in ([text], list(text)):
        assert "".join(part[1] for part in joined(parse_calls(tool, chunks))) == text


@settings(max_examples=120, deadline=None, print_blob=True)
@given(data=st.data(), seed=st.integers(0, 10**6))
def _chunk_borders_do_not_change_the_calls(tool: str, data: st.DataObject, seed: int) -> None:
    marks = [mark.text for mark in TOOL_PARSERS.get(tool).template_marks]
    rendered = [_render(name) for name in TOOL_PARSERS if not TOOL_PARSERS.get(name).__abstractmethods__]
    pieces = st.sampled_from([*_fragments(_render(tool)), *rendered, *marks, *_JSON_FRAGMENTS])
    text = "".join(data.draw(st.lists(pieces, max_size=14), "fragments"))
    whole = joined(parse_calls(tool, [text]))
    assert joined(parse_calls(tool, random_chunks(text, seed))) == whole
    assert joined(parse_calls(tool, list(text))) == whole
    if not any(part[0] == "call" for part in whole):
        assert "".join(part[1] for part in whole) == text


def test_chunk_borders_do_not_change_the_calls(tool: str) -> None:
    _chunk_borders_do_not_change_the_calls(tool)


def test_chunk_borders_do_not_change_a_call_with_a_long_part(tool: str) -> None:
    """A parser may give up on a long name. It must do so also if the name arrives in one chunk."""
    rendered = _render(tool)
    for found in _FRAGMENT.finditer(rendered):
        text = rendered[: found.end()] + "w" * 1000 + rendered[found.end() :]
        whole = joined(parse_calls(tool, [text]))
        assert joined(parse_calls(tool, random_chunks(text, seed=found.end()))) == whole
        assert joined(parse_calls(tool, list(text))) == whole


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [bytes([byte]) for byte in range(END)] + [b"</s>"]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[END]))


def _accepts(compiler: xgrammar.GrammarCompiler, tool: str, text: str, parallel: bool) -> bool:
    return _matches(compiler, TOOL_PARSERS.get(tool).calls(TOOLS, parallel=parallel), text)


def _matches(compiler: xgrammar.GrammarCompiler, content: grammar.Format, text: str) -> bool:
    compiled = compiler.compile_structural_tag(grammar.structural_tag(content).text)
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(END)


def test_the_grammar_forces_a_valid_call(compiler: xgrammar.GrammarCompiler, tool: str) -> None:
    one = _render(tool, [("search", '{"query": "x"}')])
    two = _render(tool, [("search", '{"query": "x"}'), ("now", '{"any": 1}')])
    assert _accepts(compiler, tool, one, parallel=False)
    assert _accepts(compiler, tool, one, parallel=True)
    assert _accepts(compiler, tool, two, parallel=True)
    assert not _accepts(compiler, tool, two, parallel=False)
    for wrong in (
        "",
        "Sure!",
        _render(tool, [("other", "{}")]),
        _render(tool, [("search", "{}")]),
        _render(tool, [("search", '{"query": "x", "days": "soon"}')]),
    ):
        assert not _accepts(compiler, tool, wrong, parallel=True)


def test_the_parser_reads_all_that_the_grammar_allows(compiler: xgrammar.GrammarCompiler, tool: str) -> None:
    spec = grammar.structural_tag(TOOL_PARSERS.get(tool).calls(TOOLS, parallel=True))
    compiled = compiler.compile_structural_tag(spec.text)
    bitmask = xgrammar.allocate_token_bitmask(1, END + 1)
    finished = 0
    ends = [fragment for fragment in _fragments(_render(tool)) if fragment.startswith("</")]
    for seed in range(12):
        dice, matcher, written = random.Random(seed), xgrammar.GrammarMatcher(compiled), bytearray()
        while not matcher.is_terminated() and len(written) < 400:
            # Formats that end a value with a mark instead of a character need the whole mark.
            end = dice.choice(ends).encode() if ends and dice.random() < 0.3 else b""
            ahead = matcher.fork()
            if end and all(ahead.accept_token(byte) for byte in end):
                matcher, written = ahead, written + end
                continue
            matcher.fill_next_token_bitmask(bitmask)
            words = bitmask[0].tolist()
            allowed = [t for t in range(END + 1) if words[t // 32] >> (t % 32) & 1]
            allowed = [t for t in allowed if t < 128 or t == END] or allowed
            # Closing characters are preferred, so that most calls end.
            token = dice.choice([t for t in allowed if t in CLOSING or dice.random() < 0.1] or allowed)
            assert matcher.accept_token(token)
            written += bytes([token]) if token < END else b""
        if matcher.is_terminated():
            finished += 1
            whole = joined(parse_calls(tool, [written.decode()]))
            assert whole
            for kind, called, arguments in whole:
                assert kind == "call"
                assert called in ("search", "now")
                assert isinstance(json.loads(arguments), dict)
    assert finished >= 3


def test_free_text_holds_the_calls_that_begin_in_it(compiler: xgrammar.GrammarCompiler, tool: str) -> None:
    parser = TOOL_PARSERS.get(tool)
    free, one_call = (parser.text_and_calls(TOOLS, parallel=parallel) for parallel in (True, False))
    one = _render(tool, [("search", '{"query": "x"}')])
    two = _render(tool, [("search", '{"query": "x"}'), ("now", '{"any": 1}')])
    wrong = [
        _render(tool, [("other", "{}")]),
        _render(tool, [("search", "{}")]),
        _render(tool, [("search", '{"query": "x", "days": "soon"}')]),
    ]
    for text in ("", " ", "plain\n", "a < b <", "see {this}\tor [that]", "Ünïcode ✓ \n\n x", BEFORE, one, two):
        assert _matches(compiler, free, text), text
    for text in ("", BEFORE, one):
        assert _matches(compiler, one_call, text), text
    assert not _matches(compiler, one_call, two)
    assert not any(_matches(compiler, free, text) for text in wrong)
    if parser.reads_calls_after_text:
        assert _matches(compiler, free, f"{BEFORE} {two}")
        assert not any(_matches(compiler, free, f"{BEFORE} {text}") for text in wrong)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(data=st.data())
def _calls_in_free_text_fit_their_schema(compiler: xgrammar.GrammarCompiler, tool: str, data: st.DataObject) -> None:
    """Write what the grammar allows of random fragments. Then each call that the parser finds must be valid."""
    content = TOOL_PARSERS.get(tool).text_and_calls(TOOLS, parallel=True)
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(grammar.structural_tag(content).text))
    rendered = [_render(tool, CALLS), _render(tool, [("other", "{}")]), _render(tool, [("search", '{"query": 3}')])]
    pieces = st.sampled_from([*_fragments("".join(rendered)), *rendered, *_JSON_FRAGMENTS, "plain text"])
    written = b""
    for piece in data.draw(st.lists(pieces, max_size=30), "fragments"):
        for byte in piece.encode():
            if not matcher.accept_token(byte):
                break
            written += bytes([byte])
    if not matcher.accept_token(END):
        return  # cut within a call
    for kind, *call in joined(parse_calls(tool, [written.decode("utf-8", "replace")])):
        if kind == "call":
            name, arguments = call[0], json.loads(call[1])
            assert name in ("search", "now")
            assert isinstance(arguments, dict)
            assert name == "now" or isinstance(arguments["query"], str)


def test_calls_in_free_text_fit_their_schema(compiler: xgrammar.GrammarCompiler, tool: str) -> None:
    _calls_in_free_text_fit_their_schema(compiler, tool)


@pytest.mark.parametrize("starts_inside", [False, True])
def test_the_grammar_of_the_answer_holds_after_the_reasoning(
    compiler: xgrammar.GrammarCompiler, think: str, starts_inside: bool
) -> None:
    parser = REASONING_PARSERS.get(think)
    content = parser.before(grammar.const("It is 4."), starts_inside)
    written = parser.render("Say <tool_call> or {?\n", "It is 4.")
    opened_at = next((i for i in range(len(written)) if parser.opened_by(written[:i])), 0) if starts_inside else 0
    written = written[opened_at:]
    assert _matches(compiler, content, written)
    assert not _matches(compiler, content, written.replace("It is 4.", "It is 5."))
    cut = written[: written.index("Say") + 3]
    assert _matches(compiler, content, cut), "reasoning may be cut off"


def test_a_model_with_the_tool_marks_gets_the_parser(tool: str) -> None:
    _marks_select(TOOL_PARSERS, tool)


def test_a_model_with_the_reasoning_marks_gets_the_parser(think: str) -> None:
    _marks_select(REASONING_PARSERS, think)


def _marks_select(registry: Registry[type[ToolParser]] | Registry[type[ReasoningParser]], name: str) -> None:
    for mark in registry.get(name).template_marks:
        assert mark.text
        assert find_format(registry, mark.text + mark.template_text, ()) == name, (
            f"another parser has the mark {mark.text!r} too: give the more specific mark the higher priority"
        )
        assert find_format(registry, mark.template_text, {mark.text: 7}) == name


def test_reasoning_and_text_come_out_as_rendered(think: str) -> None:
    written = REASONING_PARSERS.get(think).render(REASONING, TEXT)
    for seed in range(20):
        assert parse_reasoning(think, random_chunks(written, seed), starts_inside=False) == (REASONING, TEXT)


def test_reasoning_that_the_prompt_has_started_is_reasoning(think: str) -> None:
    parser = REASONING_PARSERS.get(think)
    written = parser.render(REASONING, TEXT)
    for end in range(len(written) + 1):
        if parser.opened_by(f"<|assistant|>\n{written[:end]}"):
            assert parse_reasoning(think, list(written[end:]), starts_inside=True) == (REASONING, TEXT)
    assert not parser.opened_by("<|assistant|>\n")
    assert not parser.opened_by(f"<|assistant|>\n{written}")


@pytest.mark.parametrize("text", ["", " ", "plain\n", "a < b <", "\n\n x \n"])
def test_an_answer_without_reasoning_is_text(think: str, text: str) -> None:
    for chunks in ([text], list(text)):
        assert parse_reasoning(think, chunks, starts_inside=False) == ("", text)


def test_truncated_reasoning_is_not_lost(think: str) -> None:
    written = REASONING_PARSERS.get(think).render(REASONING, TEXT)
    reasoning_at, text_at = written.index(REASONING), written.index(TEXT)
    for end in range(len(written)):
        reasoning, text = parse_reasoning(think, [written[:end]], starts_inside=False)
        if end <= reasoning_at:
            assert reasoning + text in ("", written[:end]), "a mark is dropped as a whole, or it is text"
        elif end <= reasoning_at + len(REASONING):
            assert (reasoning.rstrip(), text) == (written[reasoning_at:end].rstrip(), "")
        else:
            assert reasoning.startswith(REASONING)
            assert text == written[text_at:end]


@settings(max_examples=300, deadline=None, print_blob=True)
@given(data=st.data(), seed=st.integers(0, 10**6), starts_inside=st.booleans())
def _chunk_borders_do_not_change_the_reasoning(think: str, data: st.DataObject, seed: int, starts_inside: bool) -> None:
    parser = REASONING_PARSERS.get(think)
    marks = [mark.text for mark in parser.template_marks]
    pieces = st.sampled_from([*_fragments(parser.render("a é", "b")), *marks, "<", "</", ">", " ", "\n"])
    text = "".join(data.draw(st.lists(pieces, max_size=14), "fragments"))
    whole = parse_reasoning(think, [text], starts_inside)
    assert parse_reasoning(think, random_chunks(text, seed), starts_inside) == whole
    assert parse_reasoning(think, list(text), starts_inside) == whole


def test_chunk_borders_do_not_change_the_reasoning(think: str) -> None:
    _chunk_borders_do_not_change_the_reasoning(think)
