"""A draft model in the steps of a GPU, with its kernels in Triton's interpreter. test_draft_steps.py runs this file."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from gpu_interpreted import AllCaptured, DenseLengths, NothingCaptured, ReplayedStep, apply_and_upload, dense_attention
from models.eagle3_files import FORMATS, make_tensors, write_head
from tiny import make_tiny

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.engine import gpu_steps
from stoker.engine.llm import LLM
from stoker.engine.packed import StepShape
from stoker.engine.rows import RowTable
from stoker.kernels.row_tokens import LENGTH, MODEL, MODEL_START, NEXT
from stoker.sched.plan import StepPlan
from stoker.sched.request import SamplingParams

FORM = replace(FORMATS["vllm, norm before fc"], taps=(1, 3))
CHANGES = {"eagle_aux_hidden_state_layer_ids": [1, 3]}
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.7, top_k=20, seed=4, repetition_penalty=1.2),  # sampled by the reference
]
PROMPTS = [list(range(40, 70)), [5, 6, 7]]


class SomeCaptured(AllCaptured):
    """Steps that no shape holds are not captured."""

    def find(self, least: StepShape) -> ReplayedStep | None:
        return next((step for step in self._steps if step.shape.holds(least)), None)


def run(folder: Path, drafter: str, samplings: list[SamplingParams]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Return the answers, and each row's length and drafts after every step."""
    kv, sched = KvSettings(16, 64), SchedSettings(step_tokens=24, max_rows=2)
    settings = EngineSettings(
        device="cpu",
        dtype="float32",
        num_threads=1,
        steps_ahead=0,
        numerics="fast",
        kv=kv,
        sched=sched,
        drafter=drafter,
    )
    with closing(LLM(folder, settings)) as llm:
        runner, drafts = llm.built.engine._runner, []
        launch = runner.launch

        def launch_and_look(plan: StepPlan):  # type: ignore[no-untyped-def]
            launched = launch(plan)
            rows = sorted({span.row for span in plan.spans if span.samples})
            table = runner._rows.tokens[rows]
            drafts.append(table[:, [LENGTH, MODEL_START, *range(MODEL, NEXT)]].tolist())
            return launched

        runner.launch = launch_and_look  # type: ignore[method-assign]
        done = llm.generate(PROMPTS, samplings, 4)
        return [output.token_ids for output in done], drafts


@pytest.mark.parametrize(
    ("graphs", "samplings"),
    [(SomeCaptured, SAMPLINGS[:2]), (NothingCaptured, SAMPLINGS[1:])],
    ids=["captured", "eager"],
)
def test_drafts_are_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: type[NothingCaptured], samplings: list[SamplingParams]
) -> None:
    folder, head = tmp_path / "target", tmp_path / "head"
    make_tiny(folder, "qwen3", torch.float32, num_hidden_layers=4)
    write_head(head, FORM, make_tensors(FORM), CHANGES)
    expected, _ = run(folder, "off", samplings)
    answers, drafts = run(folder, f"eagle3:{head}", samplings)
    assert answers == expected
    for name in ("paged", "rope_write"):
        monkeypatch.setattr(import_module(f"stoker.kernels.{name}"), "use_triton", lambda x: True)
    for name in ("draft_inputs", "draft_steps"):
        monkeypatch.setattr(import_module(f"stoker.kernels.{name}"), "on_gpu", lambda x: True)
    monkeypatch.setattr(gpu_steps, "StepGraphs", graphs)
    monkeypatch.setattr(gpu_steps, "DensePlans", DenseLengths)
    monkeypatch.setattr(import_module("stoker.kernels.paged"), "dense_attention", dense_attention)
    monkeypatch.setattr(RowTable, "apply", apply_and_upload)
    found, found_drafts = run(folder, f"eagle3:{head}", samplings)
    assert found == expected
    assert found_drafts == drafts
    assert sum(guess >= 0 for step in drafts for row in step for guess in row[2:]) > 10
