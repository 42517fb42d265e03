"""A card's whole step on a CPU: packed inputs, rope, paged attention and drawing run in Triton's interpreter,
and give the tokens of the references. Run by test_card_steps.py, with TRITON_INTERPRET=1; nothing is captured."""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path

import pytest
import torch
import triton
from tiny import make_tiny

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.ids import RequestId
from stoker.engine import card
from stoker.engine.llm import LLM
from stoker.engine.packed import StepShape
from stoker.engine.rows import RowTable
from stoker.sched.plan import StepPlan
from stoker.sched.request import GenerateRequest, SamplingParams

assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is to be set"

GREEDY = SamplingParams(temperature=0.0)
ASKED = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=1.1, top_p=0.8, top_k=30, seed=6),
    SamplingParams(temperature=0.7, min_p=0.05, seed=7),
]
SHAPED = [
    SamplingParams(temperature=0.0, num_logprobs=3),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, logit_bias={7: 2.0}, seed=8),
]


class NothingCaptured:
    def __init__(self, *_arguments: object) -> None: ...

    def find(self, least: StepShape) -> None:
        return None

    def capture_next(self) -> bool:
        return False


plainly = RowTable.apply


def tell_the_device_too(rows: RowTable, plan: StepPlan) -> None:
    plainly(rows, plan)
    rows._tell_device(plan.new_rows, plan.block_table_changes)


def requests(rng: random.Random, samplings: list[SamplingParams]) -> list[GenerateRequest]:
    shared = [rng.randrange(199) for _ in range(20)]
    made = []
    for number, sampling in enumerate(samplings):
        prompt = shared[: rng.choice([0, 17, 20])] + [rng.randrange(199) for _ in range(rng.choice([1, 5, 19]))]
        made.append(GenerateRequest(RequestId(str(number)), prompt, len(prompt), sampling, rng.randrange(2, 5)))
    return made


def answers(folder: Path, samplings: list[SamplingParams], num_blocks: int) -> list[tuple[list[int], list[float]]]:
    sched = SchedSettings(step_tokens=24, max_rows=3)
    llm = LLM(folder, EngineSettings(device="cpu", num_threads=1, kv=KvSettings(16, num_blocks), sched=sched))
    done = llm.run(requests(random.Random(3), samplings))
    llm.close()
    return [(one.token_ids, [token.logprob for token in one.logprobs]) for one in done]


@pytest.mark.parametrize(
    ("samplings", "num_blocks"), [(ASKED, 64), (SHAPED, 4)], ids=["drawn by the step", "by the reference, preempted"]
)
def test_a_cards_steps_give_the_references_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samplings: list[SamplingParams], num_blocks: int
) -> None:
    make_tiny(tmp_path, "qwen3", torch.float32, num_hidden_layers=1)
    expected = answers(tmp_path, samplings, num_blocks)
    for name in ("paged", "rope_write"):
        monkeypatch.setattr(import_module(f"stoker.kernels.{name}"), "use_triton", lambda x: True)
    monkeypatch.setattr(card, "StepGraphs", NothingCaptured)
    monkeypatch.setattr(RowTable, "apply", tell_the_device_too)
    found = answers(tmp_path, samplings, num_blocks)
    assert [token_ids for token_ids, _ in found] == [token_ids for token_ids, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
