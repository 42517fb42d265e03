"""Steps of flex sequences that are interrupted on the real engine, and what interactive requests gain from it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny import SHAPE, make_tiny

from stoker.base.config import EngineSettings, KvSettings
from stoker.base.ids import RequestId
from stoker.engine.build import BuiltEngine, build_engine
from stoker.sched.request import GenerateRequest, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, "llama")
    return folder


class Urgent:
    """Says that an interactive request waits, from the check with the given number on."""

    def __init__(self) -> None:
        self.after: int | None = None
        self.num_checks = 0

    def __call__(self) -> bool:
        self.num_checks += 1
        return self.after is not None and self.num_checks > self.after


def built(folder: Path, urgent: Urgent, steps_ahead: int = 0, drafter: str = "off") -> BuiltEngine:
    kv = KvSettings(4, 64)
    settings = EngineSettings(device="cpu", dtype="float64", steps_ahead=steps_ahead, kv=kv, drafter=drafter)
    return build_engine(folder, settings, has_urgent=urgent)


def request(name: str, *, is_flex: bool) -> GenerateRequest:
    rng = random.Random(name)
    token_ids = [rng.randrange(SHAPE["vocab_size"]) for _ in range(20)]
    # Greedy answers of a random model repeat themselves, so that there are drafts.
    sampling = SamplingParams(seed=3) if name == "a" else SamplingParams(temperature=0.0)
    return GenerateRequest(RequestId(name), token_ids, 20, sampling, 30, is_flex=is_flex)


def answers(engine: BuiltEngine, urgent: Urgent, rng: random.Random | None, *, is_flex: bool) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in "abc"}
    for name in found:
        engine.engine.add(request(name, is_flex=is_flex))
    while engine.engine.has_work:
        if rng is not None:
            urgent.num_checks, urgent.after = 0, rng.choice([None, 0, 1])
        for chunk in engine.engine.step():
            found[chunk.request_id] += chunk.token_ids
    return found


@pytest.mark.parametrize("drafter", ["off", "auto"])
def test_interrupted_steps_do_not_change_an_answer(folder: Path, drafter: str) -> None:
    urgent = Urgent()
    expected = answers(engine := built(folder, urgent), urgent, None, is_flex=False)
    engine.close()
    engine = built(folder, urgent, drafter=drafter)
    assert answers(engine, urgent, random.Random(1), is_flex=True) == expected
    assert engine.scheduler.counters.interrupted_steps > 3
    assert engine.scheduler.counters.preemptions == 0
    assert bool(engine.scheduler.counters.draft_tokens) == (drafter == "auto")
    engine.close()


@pytest.mark.parametrize(("is_flex", "steps_ahead"), [(False, 0), (True, 1)])
def test_other_steps_are_not_interrupted(folder: Path, is_flex: bool, steps_ahead: int) -> None:
    """Interactive sequences are not, and neither are steps that later ones are launched behind."""
    urgent = Urgent()
    urgent.after = 0
    engine = built(folder, urgent, steps_ahead)
    found = answers(engine, urgent, None, is_flex=is_flex)
    assert all(len(token_ids) == 30 for token_ids in found.values())
    assert engine.scheduler.counters.interrupted_steps == 0
    engine.close()
