"""The inputs of custom tools follow their own grammar inside the call, with SmolLM2's vocabulary and random tokens."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from bench.support.apply_patch import GRAMMAR, is_patch
from stoker.base.errors import InvalidRequest
from stoker.engine.grammar import Matcher
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.engine.process.grammars.trials import GrammarTrials, TrialLimits
from stoker.sched.request import GrammarSpec, TextGrammar
from stoker.text.custom_tools import custom_arguments
from stoker.text.parsers.contract import TOOL_PARSERS, ToolArgumentsDelta, ToolCallStart
from stoker.text.parsers.grammar import structural_tag
from stoker.text.tokenizer import Tokenizer

VOCAB_SIZE = 49152
PATCH = '*** Begin Patch\n*** Update File: a "b".py\n@@ def f():\n-\told\\n\n+\tnew é\n*** End Patch'
PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_tool(name: str, grammar: TextGrammar) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS}, "input_grammar": grammar}


LARK = TextGrammar("lark", GRAMMAR)
TOOLS = [
    custom_tool("apply_patch", LARK),
    custom_tool("phone", TextGrammar("regex", r"\+[0-9]{2} [0-9]{3,9}")),
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> XGrammars:
    return XGrammars(tokenizer, VOCAB_SIZE)


def spec_of(tool: str, *, free: bool = False, tools: list[dict[str, Any]] = TOOLS) -> GrammarSpec:
    parser = TOOL_PARSERS.get(tool)
    if free:
        return structural_tag(parser.text_and_calls(tools, parallel=True), allows_text=True)
    return structural_tag(parser.calls(tools, parallel=False))


def allowed_ids(matcher: Matcher) -> list[int]:
    mask = torch.zeros(VOCAB_SIZE // 32, dtype=torch.int32)
    matcher.fill(mask)
    found: list[int] = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")).tolist()
    return found


def calls_in(tool: str, text: str, tools: list[dict[str, Any]] = TOOLS) -> list[tuple[str, str]]:
    parser = TOOL_PARSERS.get(tool)(tools)
    calls: list[tuple[str, str]] = []
    for delta in [*parser.push(text), *parser.flush()]:
        if isinstance(delta, ToolCallStart):
            calls.append((delta.name, ""))
        elif isinstance(delta, ToolArgumentsDelta):
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    return calls


def takes(grammars: XGrammars, tokenizer: Tokenizer, spec: GrammarSpec, text: str) -> bool:
    """Return True if the tokens of the text are allowed one by one, and then the end. A token ends before the input."""
    matcher = grammars.matcher(spec, [])
    before, opening, after = text.partition(spec.inputs[0].opening)
    content, end, rest = after.partition(spec.inputs[0].end) if spec.inputs[0].end != '"' else (after, "", "")
    ids = [i for part in (before + opening, content, end + rest) for i in tokenizer.encode(part)]
    for token_id in [*ids, tokenizer.eos_token_ids[0]]:
        if token_id not in allowed_ids(matcher):
            return False
        assert matcher.accept(token_id)
    return True


@pytest.mark.parametrize("tool", ["hermes", "llama3_json", "llama4_pythonic", "glm45", "minimax_m2"])
@pytest.mark.parametrize("free", [False, True])
def test_an_input_must_fit_its_grammar(grammars: XGrammars, tokenizer: Tokenizer, tool: str, free: bool) -> None:
    spec, render = spec_of(tool, free=free), TOOL_PARSERS.get(tool).render
    for name, text, fits in (
        ("apply_patch", PATCH, True),
        ("apply_patch", PATCH + "\n", True),
        ("apply_patch", "*** Begin Patch\n*** End Patch", False),
        ("apply_patch", PATCH.replace("@@", "@"), False),
        ("apply_patch", "", False),
        ("apply_patch", "+49 3012345", False),
        ("phone", "+49 3012345", True),
        ("phone", "+49 30", False),
        ("phone", PATCH, False),
    ):
        assert takes(grammars, tokenizer, spec, render([(name, custom_arguments(text))])) is fits, (name, text)
    assert takes(grammars, tokenizer, spec, render([("now", "{}")]))


@pytest.mark.parametrize("tool", ["hermes", "llama3_json", "llama4_pythonic", "glm45", "minimax_m2"])
@pytest.mark.parametrize("syntax", ["regex", "lark"])
def test_white_space_is_part_of_an_input(
    grammars: XGrammars, tokenizer: Tokenizer, tool: str, syntax: Literal["regex", "lark"]
) -> None:
    pattern = r"[\t\r\n ]*x?[\t\r\n ]*"
    grammar = TextGrammar(syntax, pattern if syntax == "regex" else f"start: /{pattern}/")
    tools = [custom_tool("f", grammar)]
    spec, render = spec_of(tool, tools=tools), TOOL_PARSERS.get(tool).render
    for text in ("\t", "\tx", "x\t", "\t\tx\t\t", "\n\tx\n\t\n", " \t x \t", "\r\n\tx\r\n", "\n", ""):
        written = render([("f", custom_arguments(text))])
        assert takes(grammars, tokenizer, spec, written), text
        [(_, arguments)] = calls_in(tool, written, tools)
        assert json.loads(arguments)["input"] == text
    for seed in range(3):
        begun = render([("f", custom_arguments("\t"))]).partition("\t")[0].partition("\\t")[0]
        written = sample(grammars, tokenizer, spec, begun, seed, limit=60)
        [(_, arguments)] = calls_in(tool, written, tools)
        assert re.fullmatch(pattern, json.loads(arguments)["input"]) is not None


def sample(grammars: XGrammars, tokenizer: Tokenizer, spec: GrammarSpec, begun: str, seed: int, limit: int) -> str:
    """Write random tokens that the grammar allows. Forced text is taken as drafts, as the engine does."""
    dice, written = random.Random(seed), tokenizer.encode(begun)
    matcher = grammars.matcher(spec, written, limit)
    while not matcher.done and len(written) < limit:
        allowed = allowed_ids(matcher)
        assert allowed
        drafts = matcher.forced(4)
        if drafts and drafts[0] in allowed and dice.random() < 0.8:
            token_id = drafts[0]
        else:
            token_id = dice.choice(allowed)
        assert matcher.accept(token_id)
        written.append(token_id)
    assert matcher.done
    return tokenizer.decode(written[:-1], skip_special_tokens=False)


BEGUN = {
    "hermes": '<tool_call>\n{"name": "apply_patch", "arguments": {"inp',
    "llama4_pythonic": "[apply_patch(inp",
    "glm45": "<tool_call>apply_patch\n<arg_key>inp",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="apply_patch">\n<parameter na',
}


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("tool", BEGUN)
def test_random_tokens_complete_a_patch_within_the_token_limit(
    grammars: XGrammars, tokenizer: Tokenizer, tool: str, free: bool
) -> None:
    spec = spec_of(tool, tools=TOOLS[:1])
    if free:
        spec = structural_tag(TOOL_PARSERS.get(tool).text_and_calls(TOOLS[:1], parallel=False), allows_text=True)
    for seed in range(12 if tool == "hermes" else 5):
        text = sample(grammars, tokenizer, spec, BEGUN[tool], seed, limit=random.Random(seed).randint(90, 200))
        ((name, arguments),) = calls_in(tool, text)
        assert name == "apply_patch"
        assert is_patch(json.loads(arguments)["input"])


def test_free_text_that_looks_like_a_call_stays_free(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    text = 'Write [phone(input="x")] for a call.\n'
    matcher = grammars.matcher(spec_of("llama4_pythonic", free=True), [], 100)
    for token_id in tokenizer.encode(text):
        assert token_id in allowed_ids(matcher)
        assert matcher.accept(token_id)


def test_a_text_that_needs_the_end_mark_ends_with_an_error(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    """A parser would end the input at the mark. The row must end, too, instead of waiting for a token."""
    spec = spec_of("minimax_m2", tools=[custom_tool("f", TextGrammar("regex", "a</parameter>b"))])
    begun = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="input">'
    matcher = grammars.matcher(spec, tokenizer.encode(begun), 100)
    for _ in range(20):
        allowed = allowed_ids(matcher)
        if matcher.too_slow:
            break
        assert matcher.accept(allowed[0])
    assert matcher.too_slow


def test_a_resumed_input_is_held_like_a_whole_one(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    spec = spec_of("hermes", free=True)
    text = "Fine. " + TOOL_PARSERS.get("hermes").render([("apply_patch", custom_arguments(PATCH)), ("now", "{}")])
    ids = tokenizer.encode(text)
    whole = grammars.matcher(spec, [], 300)
    for cut, token_id in enumerate(ids):
        if cut % 5 == 0:
            assert allowed_ids(grammars.matcher(spec, ids[:cut], 300)) == allowed_ids(whole)
        assert whole.accept(token_id)


def test_forged_tokens_of_a_resumed_answer_end_the_row(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    """No such tokens are ever sampled. They must not raise on the engine's thread."""
    spec = spec_of("hermes", free=True)
    call = TOOL_PARSERS.get("hermes").render([("phone", custom_arguments("+49 30"))])
    crossing = grammars.matcher(spec, tokenizer.encode(call), 100)  # one token is a quote and a plus sign
    assert crossing.too_slow
    begun = tokenizer.encode('<tool_call>\n{"name": "phone", "arguments": {"input": "')
    for forged in ("x", "\\", '"}}', "\n"):
        matcher = grammars.matcher(spec, begun + tokenizer.encode(forged) + tokenizer.encode("zzz"), 100)
        allowed_ids(matcher)
        matcher.forced(4)


def test_forced_text_of_an_input_is_drafted(grammars: XGrammars, tokenizer: Tokenizer) -> None:
    begun = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "'
    matcher = grammars.matcher(spec_of("hermes"), tokenizer.encode(begun), 300)
    assert tokenizer.decode(matcher.forced(16)).startswith("*** Begin Patch\\n*** ")


@pytest.mark.parametrize(
    ("syntax", "definition", "message"),
    [
        ("lark", "start: missing", "missing"),
        ("lark", "not a grammar", "expected"),
        ("lark", "", "start"),
        ("regex", "(", "regex"),
        ("regex", "a(?=b)", "look-around"),
    ],
)
def test_a_grammar_that_is_not_valid_is_refused(
    grammars: XGrammars, syntax: Any, definition: str, message: str
) -> None:
    spec = spec_of("hermes", tools=[custom_tool("f", TextGrammar(syntax, definition))])
    with pytest.raises(InvalidRequest, match=f"(?i){message}") as refused:
        grammars.prepare(spec)
    assert refused.value.code == "invalid_grammar"


HOSTILE = [
    TextGrammar("regex", "((a{0,500}){0,500}){0,500}"),
    TextGrammar("regex", "(x+x+)+y" * 50),
    TextGrammar("regex", "(a|b)*a(a|b){900}"),
    TextGrammar("lark", "start: a\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"\na: a0'),
    TextGrammar("lark", 'start: s\ns: s s s | s s | "a" | '),
    TextGrammar("lark", "start: " + "(" * 5_000 + '"a"' + ")" * 5_000),
    TextGrammar("lark", 'start: x\nx: "(" x ")" | "a"{1,60000}'),
]


@pytest.mark.parametrize("grammar", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_grammar_is_refused_or_stays_within_its_limits(
    smollm2: Path, tokenizer: Tokenizer, trials: GrammarTrials, grammar: TextGrammar
) -> None:
    grammars = XGrammars(tokenizer, VOCAB_SIZE, trials)
    spec = spec_of("hermes", tools=[custom_tool("f", grammar)])
    with contextlib.suppress(InvalidRequest):
        begun = tokenizer.encode('<tool_call>\n{"name": "f", "arguments": {"input": "')
        matcher = grammars.matcher(spec, begun, 80)
        dice = random.Random(1)
        for _ in range(60):
            if matcher.done:
                break
            allowed = allowed_ids(matcher)
            if matcher.too_slow:
                break
            assert allowed
            assert matcher.accept(dice.choice(allowed))


@pytest.fixture(scope="module")
def trials(smollm2: Path) -> Any:
    trials = GrammarTrials(smollm2, VOCAB_SIZE, TrialLimits(cpu_s=5, wall_s=30))
    yield trials
    trials.close()
