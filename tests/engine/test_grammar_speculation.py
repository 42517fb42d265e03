"""A grammar that ends or fails among accepted drafts ends the answer as it does without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from known_answers import KnownAnswers
from test_schedules import VOCAB, assert_same, random_request, run, settings
from tiny import make_tiny
from torch import Tensor

from stoker.engine.llm import LLM
from stoker.sched.request import GenerateRequest, GrammarSpec


class ModuloMatcher:
    """Ends after a token that 11 divides, or after 25 tokens. The grammar `failing` refuses tokens that 5 divides, although
    its masks allow them."""

    too_slow = False

    def __init__(self, spec: GrammarSpec, token_ids: Sequence[int]) -> None:
        self._refuses = spec.text == "failing"
        self._num_tokens = self._hash = 0
        self.done = False
        for token_id in token_ids:
            self.accept(token_id)

    def accept(self, token_id: int) -> bool:
        if self.done or (self._refuses and self._num_tokens >= 3 and token_id % 5 == 0):
            return False
        self._num_tokens += 1
        self._hash = (self._hash * 31 + token_id) % 1_000_003
        self.done = (token_id % 11 == 0 and self._num_tokens > 2) or self._num_tokens >= 25
        return True

    def fill(self, allowed: Tensor) -> None:
        for word in range(len(allowed)):
            bits = sum(1 << bit for bit in range(32) if ((word * 32 + bit) * 7 + self._hash) % 3)
            allowed[word] = bits - (1 << 32 if bits >> 31 else 0)

    def forced(self, max_tokens: int) -> list[int]:
        return []


class ModuloGrammars:
    def prepare(self, spec: GrammarSpec) -> object:
        return None

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int) -> ModuloMatcher:
        return ModuloMatcher(spec, token_ids)

    def forced_start(self, spec: GrammarSpec) -> Sequence[int]:
        return ()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, "llama")
    return folder


def with_grammar(request: GenerateRequest, text: str) -> GenerateRequest:
    return replace(request, sampling=replace(request.sampling, grammar=GrammarSpec("regex", text)))


@pytest.mark.parametrize("text", ["ending", "failing"])
@pytest.mark.parametrize("seed", [7, 10, 18])
def test_a_grammar_ends_the_answer_at_the_same_token(folder: Path, text: str, seed: int) -> None:
    """With steps in flight too: the step after the end must not compute a token that was never sampled."""
    print("seed", seed)
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    requests = [with_grammar(random_request(rng, number, shared), text) for number in range(8)]
    with closing(LLM(folder, settings(100, 512, 1, 0), grammars=ModuloGrammars())) as alone:
        lone = {one.request_id: run(alone, [(0, one)], {})[one.request_id] for one in requests}
    known = {name: [*answer.token_ids, rng.randrange(VOCAB)] for name, answer in lone.items()}
    accepted = 0
    for steps_ahead in (0, 1, 2):
        limits = (rng.choice([20, 400]), rng.choice([3, 64]), rng.choice([1, 5, 16]), steps_ahead)
        print(limits)
        drafts = KnownAnswers(known, VOCAB, rng)
        made = LLM(folder, settings(*limits), grammars=ModuloGrammars(), wrap_drafting=lambda _, drafts=drafts: drafts)
        with closing(made) as llm:
            found = run(llm, [(rng.randint(0, 20), one) for one in requests], {})
            for one in requests:
                assert_same(one, found[one.request_id], lone[one.request_id], cancelled=False)
            accepted += llm.built.scheduler.counters.accepted_draft_tokens
    assert accepted, "no draft was accepted"
