"""The steps of the stages of a pipeline as on GPUs, with their kernels in Triton's interpreter. test_gpu_steps.py runs this file.

Ranks are threads, and their kernels run one at a time. The tokens must equal those of one rank with the reference kernels.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_interpreted import GREEDY, PLAIN, WITH_EXTRAS, AllCaptured, requests, run_like_a_gpu
from known_answers import KnownAnswers
from models.eagle3_files import FORMATS, make_tensors, write_head
from parallel.virtual_ranks import VirtualRanks
from tiny import make_tiny
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from stoker.base.config import EngineSettings, KvSettings, RankSettings, SchedSettings
from stoker.engine.gpu_stages import StageGpuSteps
from stoker.engine.graphs import StepOutputs
from stoker.engine.llm import LLM
from stoker.engine.packed import StepInputs, StepShape
from stoker.sched.request import SamplingParams
from stoker.train.evaluate import EveryDraft


@dataclass
class ReusedMemory:
    """A captured step as a GPU replays it: from a copy of the inputs, and over what the replay before returned."""

    shape: StepShape
    forward: Callable[[StepInputs], Any]
    replayed: list[Tensor]  # what the last replay of any step of this part returned
    inputs: StepInputs

    def run(self, packed: Tensor, num_guesses: int) -> StepOutputs:
        for x in self.replayed:
            x.fill_(float("nan") if x.dtype.is_floating_point else 1 << 40)
        self.inputs.packed.copy_(packed)
        outputs = self.forward(self.inputs)
        found = [getattr(outputs, field.name) for field in fields(outputs)]
        found += getattr(outputs, "tapped", ())
        inputs = self.inputs.packed.untyped_storage().data_ptr()
        tensors = [x for x in found if isinstance(x, Tensor) and x.untyped_storage().data_ptr() != inputs]
        self.replayed[:] = tensors
        outputs.guesses.make(num_guesses)
        return outputs


class MemoryIsReused(AllCaptured):
    """Every shape is captured, except that steps of some sizes find none, as long prompts do."""

    def __init__(
        self, forward: Callable[[StepInputs], Any], first: list[StepShape], rest: list[StepShape], device: torch.device
    ) -> None:
        replayed: list[Tensor] = []
        shapes = sorted((*first, *rest), key=lambda shape: shape.tokens)
        self._captured = [ReusedMemory(one, forward, replayed, StepInputs.empty(one, device)) for one in shapes]

    def find(self, least: StepShape) -> ReusedMemory | None:  # type: ignore[override]
        if least.tokens % 3 == 0:
            return None
        return next(step for step in self._captured if step.shape.holds(least))


@pytest.fixture(autouse=True)
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps the place within the grid in globals."""
    launch, lock = GridExecutor.__call__, threading.Lock()

    def launch_alone(self: GridExecutor, *args: Any, **options: Any) -> None:
        with lock:
            launch(self, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", launch_alone)


def settings(ranks: RankSettings, drafter: str) -> EngineSettings:
    return EngineSettings(
        device="cpu",
        dtype="float32",
        num_threads=1,
        drafter=drafter,
        numerics="fast",
        kv=KvSettings(16, 64),
        sched=SchedSettings(step_tokens=24, max_rows=4),
        ranks=ranks,
    )


def answers(
    folder: Path,
    samplings: list[SamplingParams],
    pp: int,
    known: dict[str, list[int]] | None = None,
) -> list[tuple[list[int], list[float]]]:
    """With `known` answers, drafts are made from them."""
    ranks = None if pp == 1 else VirtualRanks()
    given = settings(RankSettings(1, pp, 1), "off" if known is None else "ngram")
    drafts = None if known is None else KnownAnswers(known, 199, random.Random(4))
    with closing(LLM(folder, given, ranks=ranks, wrap_drafting=lambda built: drafts or built)) as llm:
        if ranks is not None:
            runners = [llm.built.engine._runner._runner, *(part.runner for part in ranks.parts.values())]
            assert all(isinstance(one._gpu_steps, StageGpuSteps) for one in runners)
        done = llm.run(requests(random.Random(3), samplings))
        assert known is None or llm.built.scheduler.counters.accepted_draft_tokens
    return [(one.token_ids, [token.logprob for token in one.logprobs]) for one in done]


@pytest.mark.parametrize(
    ("pp", "samplings", "drafts"),
    [
        (3, PLAIN[:2], True),
        (2, [WITH_EXTRAS[1], *PLAIN[2:3]], False),  # sampled by the reference
    ],
)
def test_stages_give_the_tokens_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pp: int, samplings: list[SamplingParams], drafts: bool
) -> None:
    make_tiny(tmp_path, "qwen3", torch.float32, num_hidden_layers=pp)
    expected = answers(tmp_path, samplings, 1)
    run_like_a_gpu(monkeypatch, MemoryIsReused)
    known = {str(number): token_ids for number, (token_ids, _) in enumerate(expected)}
    found = answers(tmp_path, samplings, pp, known if drafts else None)
    assert [token_ids for token_ids, _ in found] == [token_ids for token_ids, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_draft_model_gets_the_states_of_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its guesses are verified: with wrong states, the answers would be the same, and nearly none of them would be accepted."""
    folder, head = tmp_path / "target", tmp_path / "head"
    make_tiny(folder, "qwen3", torch.float32, num_hidden_layers=3)
    form = replace(FORMATS["vllm, norm before fc"], taps=(0, 2))
    write_head(head, form, make_tensors(form), {"eagle_aux_hidden_state_layer_ids": [0, 2]})
    prompts = [list(range(40, 58)), [5, 6, 7]]

    def run(pp: int) -> tuple[list[list[int]], list[int]]:
        ranks, given = None if pp == 1 else VirtualRanks(), settings(RankSettings(1, pp, 1), f"eagle3:{head}")
        with closing(LLM(folder, given, ranks=ranks, wrap_drafting=EveryDraft)) as llm:
            done = llm.generate(prompts, GREEDY, 6)
            counters = llm.built.scheduler.counters
            return [one.token_ids for one in done], [counters.draft_tokens, counters.accepted_draft_tokens]

    expected = run(1)
    run_like_a_gpu(monkeypatch, MemoryIsReused)
    for name in ("draft_inputs", "draft_steps"):
        monkeypatch.setattr(import_module(f"stoker.kernels.{name}"), "on_gpu", lambda x: True)
    assert run(2) == expected
