"""With every drafter, the real engine in float64 gives the answers that it gives without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from test_schedules import VOCAB, random_request, run
from tiny import make_tiny
from torch import Tensor

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.errors import ConfigError
from stoker.engine.llm import LLM, LLMOutput
from stoker.sched.request import GenerateRequest, GrammarSpec, SamplingParams
from stoker.sched.step_costs import StepCosts
from stoker.sched.step_size import StepSize
from stoker.spec.choose_drafters import DrafterChoice
from stoker.spec.drafter import DRAFTERS


class StartMatcher:
    """Forces the numbers in the grammar's text, in their order. Then every token is allowed."""

    done = too_slow = False

    def __init__(self, spec: GrammarSpec, token_ids: Sequence[int]) -> None:
        self._forced = [int(number) for number in spec.text.split()]
        for token_id in token_ids:
            self.accept(token_id)

    def accept(self, token_id: int) -> bool:
        is_allowed = not self._forced or self._forced[0] == token_id
        self._forced = self._forced[1:]
        return is_allowed

    def fill(self, allowed: Tensor) -> None:
        allowed.fill_(0 if self._forced else -1)
        for token_id in self._forced[:1]:
            allowed[token_id >> 5] = 1 << (token_id & 31)

    def forced(self, max_tokens: int) -> list[int]:
        return self._forced[:max_tokens]


class StartGrammars:
    def prepare(self, spec: GrammarSpec) -> object:
        return None

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int) -> StartMatcher:
        return StartMatcher(spec, token_ids)

    def forced_start(self, spec: GrammarSpec) -> Sequence[int]:
        return StartMatcher(spec, []).forced(64)


START = GrammarSpec("regex", "60 62 64 66 68 70 72 74")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, "llama")
    return folder


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the number of drafts depends on how fast this machine is."""
    monkeypatch.setattr(StepSize, "costs", StepCosts())


def settings(drafter: str, num_blocks: int = 400, max_rows: int = 16, steps_ahead: int = 0) -> EngineSettings:
    return EngineSettings(
        dtype="float64",
        device="cpu",
        drafter=drafter,
        num_threads=1,
        steps_ahead=steps_ahead,
        kv=KvSettings(block_tokens=4, num_blocks=num_blocks),
        sched=SchedSettings(step_tokens=64, max_rows=max_rows),
    )


def requests(rng: random.Random, count: int) -> list[GenerateRequest]:
    """Requests of which some are repeated, so that every drafter finds something."""
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    made = [random_request(rng, number, shared) for number in range(count)]
    made = [replace(one, prediction=tuple(rng.randrange(VOCAB) for _ in range(30))) for one in made]
    return [
        one if i % 3 else replace(one, sampling=replace(one.sampling, grammar=START, min_tokens=0))
        for i, one in enumerate(made)
    ]


def same(found: LLMOutput, expected: LLMOutput) -> bool:
    return (found.token_ids, found.finish) == (expected.token_ids, expected.finish)


def with_predictions(wanted: list[GenerateRequest], answers: dict[str, LLMOutput]) -> list[GenerateRequest]:
    """Predict each answer, except for its middle."""
    return [
        replace(
            one, prediction=tuple(token if i % 9 else 1 for i, token in enumerate(answers[one.request_id].token_ids))
        )
        for one in wanted
    ]


@pytest.mark.parametrize("drafter", [*DRAFTERS, "auto"])
@pytest.mark.parametrize(("num_blocks", "max_rows", "steps_ahead"), [(400, 1, 0), (18, 16, 1), (400, 64, 2)])
def test_drafts_change_no_answer_and_return_every_block(
    folder: Path, drafter: str, num_blocks: int, max_rows: int, steps_ahead: int
) -> None:
    rng = random.Random(f"{drafter} {max_rows}")
    wanted = requests(rng, 6 if max_rows == 1 else 20)
    with closing(LLM(folder, settings("off", max_rows=1), grammars=StartGrammars())) as llm:
        expected = run(llm, [(0, one) for one in wanted], {})
    wanted = with_predictions(wanted, expected)
    drafts = 0
    with closing(LLM(folder, settings(drafter, num_blocks, max_rows, steps_ahead), grammars=StartGrammars())) as llm:
        for _ in range(2):  # the second time, the answers are in the caches
            arrivals = [(rng.randint(0, 10), one) for one in wanted]
            found = run(llm, arrivals, {})
            assert all(same(found[request_id], expected[request_id]) for request_id in expected)
        counters = llm.built.scheduler.counters
        drafts = counters.draft_tokens
        assert counters.accepted_draft_tokens <= drafts
        by_source = llm.built.draft_counts.by_source
        assert drafter == "auto" or set(by_source) <= {drafter}
        assert max_rows != 1 or counters.accepted_draft_tokens, f"{drafter} was never right"
    for request_id, answer in found.items():
        usage = answer.usage
        assert usage is not None
        assert usage.completion_tokens == len(expected[request_id].token_ids)
        assert usage.accepted_draft_tokens <= usage.draft_tokens


def test_a_repeated_greedy_request_takes_few_steps(folder: Path) -> None:
    prompt, sampling = [3, 1, 4, 1, 5, 9, 2, 6], SamplingParams(temperature=0.0)
    with closing(LLM(folder, settings("suffix,cache"))) as llm:
        first, steps_alone = llm.generate([prompt], sampling, 64), llm.built.engine.num_steps
        second = llm.generate([prompt], sampling, 64)
    assert first[0].token_ids == second[0].token_ids
    assert llm.built.engine.num_steps - steps_alone <= steps_alone // 4


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_a_forced_beginning_takes_one_step_after_the_prompt(folder: Path, steps_ahead: int) -> None:
    """Also where that step is planned before the prompt's result is known."""
    num_forced = len(START.text.split())
    sampling = SamplingParams(temperature=0.0, grammar=START)
    with closing(LLM(folder, settings("grammar", steps_ahead=steps_ahead), grammars=StartGrammars())) as llm:
        [answer] = llm.generate([[3, 1, 4]], sampling, num_forced)
    assert " ".join(map(str, answer.token_ids)) == START.text
    assert answer.usage is not None
    assert answer.usage.accepted_draft_tokens == num_forced - 2


def test_drafts_stop_at_the_last_token_of_the_context(folder: Path) -> None:
    """The oracle would draft beyond the limit."""
    prompt, sampling = [2, 7, 1, 8], SamplingParams(temperature=0.0)
    with closing(LLM(folder, settings("oracle"))) as llm:
        whole = llm.generate([prompt], sampling, 40)[0].token_ids
        for limit in (1, 2, 3, 17, 40):
            [answer] = llm.generate([prompt], sampling, limit)
            assert answer.token_ids == whole[:limit]
            assert answer.finish is not None
            assert answer.finish.reason == "length"


def test_two_tenants_never_share_drafts(folder: Path) -> None:
    """The same request of another tenant is verified without a single right draft of the first one."""
    prompt, sampling = [5, 5, 6, 7, 8, 1, 2], SamplingParams(temperature=1.0, seed=11)
    drafters = ",".join(name for name in DRAFTERS if name not in ("ngram", "prediction"))
    with closing(LLM(folder, settings(drafters))) as llm:
        llm.generate([prompt], sampling, 50, cache_salt="alice")
        before = llm.built.scheduler.counters.draft_tokens
        [same_tenant] = llm.generate([prompt], sampling, 50, cache_salt="alice")
        after_own = llm.built.scheduler.counters.draft_tokens
        [other] = llm.generate([prompt], sampling, 50, cache_salt="bob")
        assert after_own > before
        assert other.token_ids == same_tenant.token_ids
        # What bob drafts can only come from his own output, which hardly repeats itself.
        assert llm.built.scheduler.counters.draft_tokens - after_own < (after_own - before) / 2


@pytest.mark.parametrize(
    "setting",
    ["no such drafter", "ngram:5", "oracle:2", "oracle:x", "auto,ngram", "", "grammar:x", "auto:x", "off,ngram",
     "eagle3", "eagle3:a,eagle3:b"],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_name(folder: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match="drafter"):
        LLM(folder, settings(setting))


def test_the_setting_is_read() -> None:
    assert not DrafterChoice.parse("off").is_on
    assert DrafterChoice.parse("auto").drafts_grammar
    assert DrafterChoice.parse("ngram, oracle:0.5").arguments == {"ngram": "", "oracle": "0.5"}
