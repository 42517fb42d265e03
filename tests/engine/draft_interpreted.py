"""A draft model in the steps of a GPU, with its kernels in Triton's interpreter. test_draft_steps.py runs this file."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from gpu_interpreted import AllCaptured, NothingCaptured, ReplayedStep, run_like_a_gpu
from models.eagle3_files import FORMATS, Format, make_tensors, write_head
from tiny import make_tiny

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.engine.llm import LLM
from stoker.engine.packed import StepShape
from stoker.kernels.row_tokens import LENGTH, MODEL, MODEL_START, NEXT
from stoker.sched.plan import StepPlan
from stoker.sched.request import SamplingParams
from stoker.train.evaluate import EveryDraft

GROUPED, LATENT = (replace(FORMATS[name], taps=(0, 1)) for name in ("vllm, norm before fc", "vllm, MLA"))
CHANGES = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.7, top_k=20, seed=4, repetition_penalty=1.2),  # sampled by the reference
]
PROMPTS = [list(range(40, 60)), [5, 6, 7]]


class SomeCaptured(AllCaptured):
    """Steps that no shape holds are not captured."""

    def find(self, least: StepShape) -> ReplayedStep | None:
        return next((step for step in self._steps if step.shape.holds(least)), None)


Guesses = dict[tuple[int, int], list[int]]


def run(folder: Path, drafter: str, samplings: list[SamplingParams]) -> tuple[list[list[int]], Guesses]:
    """Return the answers, and the guesses after every step, by the lengths of the prompt and of the sequence."""
    kv, sched = KvSettings(16, 64), SchedSettings(step_tokens=16, max_rows=2)
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
    with closing(LLM(folder, settings, wrap_drafting=EveryDraft)) as llm:
        runner = llm.built.engine._runner
        guesses: Guesses = {}
        launch = runner.launch

        def launch_and_look(plan: StepPlan):  # type: ignore[no-untyped-def]
            launched = launch(plan)
            for row in {span.row for span in plan.spans if span.samples}:
                table = runner._rows.tokens[row].tolist()
                assert table[MODEL_START] == table[LENGTH] or drafter == "off"
                guesses[runner._rows.states[row].num_prompt, table[LENGTH]] = table[MODEL:NEXT]
            return launched

        runner.launch = launch_and_look  # type: ignore[method-assign]
        done = llm.generate(PROMPTS, samplings, 4)
        return [output.token_ids for output in done], guesses


@pytest.mark.parametrize(
    ("graphs", "samplings", "form"),
    [
        (SomeCaptured, SAMPLINGS[:2], GROUPED),
        (NothingCaptured, SAMPLINGS[1:], GROUPED),
        (SomeCaptured, SAMPLINGS[:2], LATENT),
    ],
    ids=["captured", "eager", "latent"],
)
def test_drafts_are_those_of_the_reference(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    graphs: type[NothingCaptured],
    samplings: list[SamplingParams],
    form: Format,
) -> None:
    folder, head = tmp_path / "target", tmp_path / "head"
    make_tiny(folder, "qwen3", torch.float32, num_hidden_layers=2)
    write_head(head, form, make_tensors(form), CHANGES)
    expected, _ = run(folder, "off", samplings)
    answers, drafts = run(folder, f"eagle3:{head}", samplings)
    assert answers == expected
    run_like_a_gpu(monkeypatch, graphs)
    for name in ("draft_inputs", "draft_steps"):
        monkeypatch.setattr(import_module(f"stoker.kernels.{name}"), "on_gpu", lambda x: True)
    found, found_drafts = run(folder, f"eagle3:{head}", samplings)
    assert found == expected
    # A row may not have a block for the last guesses.
    both = drafts.keys() & found_drafts.keys()
    pairs = [pair for key in both for pair in zip(drafts[key], found_drafts[key], strict=True) if min(pair) >= 0]
    assert all(ours == theirs for ours, theirs in pairs)
    assert len(pairs) > 8
