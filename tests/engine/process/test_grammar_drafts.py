"""A step's result carries what the rows' grammars force next, if the runner is built for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.base.ids import Row
from stoker.engine.process.grammars import forced_text
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.engine.process.grammars.matcher import XGrammarMatcher
from stoker.engine.rows import RowTable
from stoker.engine.runner import Runner, VerifiedTokens
from stoker.engine.sampler import SampledTokens
from stoker.engine.threads import FixedThreads
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.device.device_kv import DeviceKv
from stoker.sched.plan import NewRow, Span, StepPlan, StepResult
from stoker.sched.request import GrammarSpec, SamplingParams
from stoker.text.tokenizer import Tokenizer

VOCAB_SIZE = 49152
CALL = SamplingParams(grammar=GrammarSpec("regex", r'\{"name": "[a-z]+"\}'))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


def results(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str, *, drafts_grammar: bool
) -> list[StepResult]:
    """The results of the steps that sample `text` in row 0. Row 1 has no grammar."""
    monkeypatch.setattr(forced_text, "_MAX_SEARCH_S", 60.0)
    rows = RowTable(2, 1, VOCAB_SIZE, torch.device("cpu"), XGrammars(tokenizer, VOCAB_SIZE))
    kv = DeviceKv(KvLayout.of(1, 1, 2, 4, "float64", 8), 1, torch.device("cpu"))
    model: Any = None
    threads = FixedThreads(torch.get_num_threads())
    runner = Runner(model, 1, kv, rows, threads, 16, drafts_grammar=drafts_grammar)
    rest = iter(tokenizer.encode(text))

    def step(plan: StepPlan, states: object) -> Callable[[], VerifiedTokens]:
        verified = VerifiedTokens(SampledTokens(torch.tensor([next(rest), 7]), None, None, None), None, [0, 1])
        return lambda: verified

    monkeypatch.setattr(runner, "_step", step)
    new_rows = [NewRow(Row(0), CALL, [5], 1, 64), NewRow(Row(1), SamplingParams(), [5], 1, 64)]
    found = []
    for i in range(len(tokenizer.encode(text))):
        spans = [Span(Row(0), i, 1, True), Span(Row(1), i, 1, True)]
        found.append(runner.launch(StepPlan(spans, [5, 5], new_rows=[] if i else new_rows)).wait())
    return found


def test_forced_tokens_are_returned_for_rows_with_a_grammar(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{"name": "weather"}'
    ids = tokenizer.encode(text)
    found = results(tokenizer, monkeypatch, text, drafts_grammar=True)
    assert [result.errors for result in found] == [{}] * len(ids)
    forced = tokenizer.encode('{"name": "')
    for i in range(len(forced) - 1):
        assert found[i].drafts == {0: forced[i + 1 :]}
    assert found[len(forced) - 1].drafts == {}, "the name is a choice"
    assert found[-1].drafts == {0: [tokenizer.eos_token_ids[0]]}, "only the end may follow"


def test_nothing_is_searched_without_the_grammar_drafter(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(XGrammarMatcher, "forced", lambda *_: pytest.fail("searched"))
    assert all(not result.drafts for result in results(tokenizer, monkeypatch, '{"name', drafts_grammar=False))
