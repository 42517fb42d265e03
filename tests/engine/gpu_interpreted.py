"""A whole GPU step on a CPU: packed inputs, rope, paged attention and sampling run in Triton's interpreter.

The tokens must equal those of the reference kernels. test_gpu_steps.py runs this file with TRITON_INTERPRET=1. A step that a
GPU would replay from a graph is executed again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
import triton
from known_answers import KnownAnswers
from tiny import make_tiny
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.ids import RequestId
from stoker.engine import gpu_batches, gpu_stages, gpu_steps
from stoker.engine.build import build_engine
from stoker.engine.graphs import StepOutputs
from stoker.engine.llm import LLM
from stoker.engine.packed import StepInputs, StepShape
from stoker.engine.rows import RowTable
from stoker.kernels.dense import DensePlans
from stoker.sched.plan import StepPlan
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.train.target_forward import TargetForward

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

GREEDY = SamplingParams(temperature=0.0)
PLAIN = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=1.1, top_p=0.8, top_k=30, seed=6),
    SamplingParams(temperature=0.7, min_p=0.05, seed=7),
]
WITH_EXTRAS = [
    SamplingParams(temperature=0.0, num_logprobs=3),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, logit_bias={7: 2.0}, seed=8),
]


class NothingCaptured:
    def __init__(self, *_arguments: object) -> None: ...

    def find(self, least: StepShape) -> ReplayedStep | None:
        return None

    def capture_next(self) -> bool:
        return False


@dataclass
class ReplayedStep:
    """Like a captured step, it reads only its packed inputs."""

    shape: StepShape
    forward: Callable[[StepInputs], StepOutputs]

    def run(self, packed: Tensor, num_guesses: int) -> StepOutputs:
        outputs = self.forward(StepInputs.of(packed, self.shape))
        outputs.guesses.make(num_guesses)
        return outputs


class AllCaptured(NothingCaptured):
    def __init__(self, forward: Callable[[StepInputs], StepOutputs], first: list[StepShape], rest: list[StepShape],
                 _device: torch.device) -> None:  # fmt: skip
        self._steps = [
            ReplayedStep(shape, forward) for shape in sorted((*first, *rest), key=lambda shape: shape.tokens)
        ]

    def find(self, least: StepShape) -> ReplayedStep | None:
        return next(step for step in self._steps if step.shape.holds(least))


class DenseLengths(DensePlans):
    """Takes prompts of 8 or 16 tokens out of the paged attention."""

    def __init__(self, like: Tensor, shapes: list[tuple[int, int, int]], most: int | None) -> None:
        super().__init__(like, shapes, most)
        self.lengths = [length for length in (8, 16) if most is None or length <= most]


def dense_attention(q: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    batched = (part.transpose(0, 1)[None] for part in (q, key, value))
    return scaled_dot_product_attention(*batched, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


apply_on_host = RowTable.apply


def apply_and_upload(rows: RowTable, plan: StepPlan) -> None:
    apply_on_host(rows, plan)
    rows._upload(plan.new_rows, plan.block_table_changes)


def requests(rng: random.Random, samplings: list[SamplingParams]) -> list[GenerateRequest]:
    shared = [rng.randrange(199) for _ in range(20)]
    made = []
    for number, sampling in enumerate(samplings):
        prompt = shared[: rng.choice([0, 17, 20])] + [rng.randrange(199) for _ in range(rng.choice([1, 5, 19]))]
        made.append(GenerateRequest(RequestId(str(number)), prompt, len(prompt), sampling, rng.randrange(3, 5)))
    return made


def answers(
    folder: Path,
    samplings: list[SamplingParams],
    num_blocks: int,
    kv_dtype: str,
    known: dict[str, list[int]] | None = None,
) -> list[tuple[list[int], list[float]]]:
    """With `known` answers, drafts are made from them."""
    sched, kv = SchedSettings(step_tokens=24, max_rows=3), KvSettings(16, num_blocks, dtype=kv_dtype)
    # The drafter only says that steps verify drafts; it is replaced below.
    drafter, steps_ahead = ("off", 0) if known is None else ("ngram", 1)
    settings = EngineSettings(
        device="cpu", num_threads=1, steps_ahead=steps_ahead, drafter=drafter, numerics="fast", kv=kv, sched=sched
    )
    drafts = None if known is None else KnownAnswers(known, 199, random.Random(4))
    llm = LLM(folder, settings, wrap_drafting=lambda built: drafts or built)
    done = llm.run(requests(random.Random(3), samplings))
    llm.close()
    assert known is None or llm.built.scheduler.counters.accepted_draft_tokens
    return [(one.token_ids, [token.logprob for token in one.logprobs]) for one in done]


def run_like_a_gpu(monkeypatch: pytest.MonkeyPatch, graphs: type[NothingCaptured]) -> None:
    """Let engines on the CPU use the kernels and the steps of a GPU, with fakes of its graphs and of cuDNN."""
    for name in ("paged", "rope_write", "mla", "latent_write", "head_matmul"):
        monkeypatch.setattr(import_module(f"stoker.kernels.{name}"), "use_triton", lambda x: True)
    for module in (gpu_steps, gpu_stages):
        monkeypatch.setattr(module, "StepGraphs", graphs)
    monkeypatch.setattr(gpu_batches, "DensePlans", DenseLengths)
    monkeypatch.setattr(import_module("stoker.kernels.paged"), "dense_attention", dense_attention)
    monkeypatch.setattr(RowTable, "apply", apply_and_upload)


@pytest.mark.parametrize(
    ("model", "graphs", "samplings", "num_blocks", "kv_dtype", "drafts"),
    [
        ("qwen3", NothingCaptured, PLAIN, 64, "auto", True),
        ("qwen3", AllCaptured, WITH_EXTRAS, 4, "auto", True),  # sampled by the reference, with preemption
        ("qwen3", NothingCaptured, PLAIN[:3], 64, "int8", False),
        ("deepseek", NothingCaptured, PLAIN[:2], 64, "auto", True),
        ("deepseek", NothingCaptured, PLAIN[:1], 64, "fp8_e4m3", False),
        ("gpt-oss", AllCaptured, PLAIN[:2], 64, "auto", True),
        ("llama4-scout", NothingCaptured, PLAIN[:2], 64, "auto", True),
    ],
)
def test_gpu_steps_give_the_tokens_of_the_references(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    graphs: type[NothingCaptured],
    samplings: list[SamplingParams],
    num_blocks: int,
    kv_dtype: str,
    drafts: bool,
) -> None:
    # With one layer, only the attention of the last token would matter.
    changes = {"no_rope_layers": [1, 0]} if model == "llama4-scout" else {}
    make_tiny(tmp_path, model, torch.float32, num_hidden_layers=2, **changes)
    expected = answers(tmp_path, samplings, num_blocks, kv_dtype)
    run_like_a_gpu(monkeypatch, graphs)
    known = {str(number): token_ids for number, (token_ids, _) in enumerate(expected)}
    found = answers(tmp_path, samplings, num_blocks, kv_dtype, known if drafts else None)
    assert [token_ids for token_ids, _ in found] == [token_ids for token_ids, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_head_is_trained_on_the_states_of_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_heads = make_tiny(tmp_path, "qwen3", torch.float32, num_hidden_layers=3).config.num_attention_heads
    built = build_engine(tmp_path, EngineSettings(device="cpu", num_threads=1, kv=KvSettings(16, 4)))
    sequences = [[(7 * i + length) % 199 for i in range(length)] for length in (19, 1, 33)]

    def states() -> list[Tensor]:
        found = TargetForward(built, num_heads, (1, 2), 3, 64, 40).run(sequences)
        return [found.features, found.hidden]

    expected = states()
    run_like_a_gpu(monkeypatch, NothingCaptured)
    for ours, theirs in zip(states(), expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-4
    built.close()
