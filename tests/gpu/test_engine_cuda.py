"""The engine gives the same answers on a CUDA device as on a CPU. Runs under pytest (-m gpu), or as a script without
pytest."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

from stoker.base.config import EngineSettings, KvSettings, RankSettings, SchedSettings
from stoker.base.ids import RequestId
from stoker.engine.llm import LLM
from stoker.sched.request import GenerateRequest, SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 997,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def make_folder(path: Path, config: dict[str, Any] = CONFIG) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    # CPU and CUDA generate different random weights from one seed, so both load the same file.
    from safetensors.torch import save_file

    from stoker.models.family import family_of
    from stoker.models.weights import parameter_slices

    family = family_of(config, "config.json")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = family.build(64)
    torch.set_default_dtype(torch.float32)
    save_file({name: torch.randn(place.shape, dtype=torch.float64) * 0.2 for name, place in parameter_slices(model, family.rules)},
              path / "model.safetensors")  # fmt: skip
    return path


def answers(
    folder: Path,
    device: str,
    steps_ahead: int,
    num_blocks: int,
    step_tokens: int,
    dtype: str = "float64",
    plain: bool = False,
    ranks: RankSettings | None = None,
) -> list[list[int]]:
    """`plain` is what the GPU samples in one launch, without penalties, biases and logprobs."""
    rng = random.Random(5)
    shared = [rng.randrange(997) for _ in range(100)]
    prompts = [
        shared[: rng.randint(0, 100)] + [rng.randrange(997) for _ in range(rng.randint(1, 60))] for _ in range(24)
    ]
    sampling = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0.0, 0.02]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            logit_bias=rng.choice([{}, {5: 3.0}]),
            seed=rng.randrange(1 << 62),
            num_logprobs=rng.choice([None, 3]),
            stop_token_ids=(7,),
            min_tokens=rng.choice([0, 10]),
        )
        for _ in prompts
    ]
    if plain:
        sampling = [
            SamplingParams(s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p, seed=s.seed, stop_token_ids=(7,))
            for s in sampling
        ]
    settings = EngineSettings(
        device=device,
        dtype=dtype,
        steps_ahead=steps_ahead,
        num_threads=2,
        kv=KvSettings(block_tokens=16, num_blocks=num_blocks),
        sched=SchedSettings(step_tokens=step_tokens, max_rows=16),
        ranks=ranks or RankSettings(),
    )
    with closing(LLM(folder, settings)) as llm:
        completions = llm.generate(prompts, sampling, max_new_tokens=40)
        assert llm.built.pool.num_free == num_blocks
    return [completion.token_ids for completion in completions]


def test_cuda_gives_the_answers_of_the_cpu() -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = make_folder(Path(path))
        expected = answers(folder, "cpu", 0, 2000, 512)
        for steps_ahead, num_blocks, step_tokens in [(0, 2000, 512), (1, 2000, 64), (1, 40, 512), (2, 16, 33)]:
            found = answers(folder, DEVICE, steps_ahead, num_blocks, step_tokens)
            assert found == expected, f"ahead {steps_ahead}, {num_blocks} blocks, {step_tokens} tokens a step"


def test_kernels_and_graphs_give_the_answers_of_the_cpu() -> None:
    """In float32, where the GPU uses its own kernels and replays captured steps: rounding differs, tokens do not."""
    with tempfile.TemporaryDirectory() as path:
        folder = make_folder(Path(path))
        for plain in (True, False):
            expected = answers(folder, "cpu", 0, 2000, 512, "float32", plain)
            for steps_ahead, num_blocks, step_tokens in [(0, 2000, 512), (1, 2000, 64), (1, 40, 512), (2, 16, 33)]:
                found = answers(folder, DEVICE, steps_ahead, num_blocks, step_tokens, "float32", plain)
                same = sum(a == b for a, b in zip(found, expected, strict=True))
                assert found == expected, (
                    f"{same} of {len(expected)}: {plain=} {steps_ahead=} {num_blocks=} {step_tokens=}"
                )


def test_cancelled_and_new_requests_do_not_affect_the_others() -> None:
    """Rows and blocks change owners while steps for their former owners are still running."""
    with tempfile.TemporaryDirectory() as path:
        folder = make_folder(Path(path))
        expected = _with_cancels(folder, "cpu", 0)
        for steps_ahead in (0, 1, 3):
            assert _with_cancels(folder, DEVICE, steps_ahead) == expected, f"{steps_ahead=}"


def _with_cancels(folder: Path, device: str, steps_ahead: int) -> dict[str, list[int]]:
    """Return the answers of the requests that were not cancelled."""
    settings = EngineSettings(
        device=device,
        dtype="float32",
        steps_ahead=steps_ahead,
        num_threads=2,
        kv=KvSettings(block_tokens=16, num_blocks=60),
        sched=SchedSettings(step_tokens=96, max_rows=8),
    )
    engine, rng = LLM(folder, settings).built.engine, random.Random(3)
    answers: dict[str, list[int]] = {}
    for number in range(300):
        if number < 60:
            prompt = [rng.randrange(997) for _ in range(rng.choice([1, 5, 40, 90]))]
            sampling = SamplingParams(rng.choice([0.0, 0.9]), seed=number, top_p=rng.choice([1.0, 0.9]))
            name = RequestId(f"{number}")
            answers[name] = []
            engine.add(GenerateRequest(name, prompt, len(prompt), sampling, rng.randint(1, 30)))
            if number % 3 == 2:  # a running or waiting one; it may have ended by then
                cancelled = RequestId(f"{number - rng.randrange(1, 6)}")
                engine.cancel(cancelled)
                answers.pop(cancelled, None)
        for chunk in engine.step():
            if chunk.request_id in answers:
                answers[chunk.request_id] += chunk.token_ids
    while engine.has_work:
        for chunk in engine.step():
            if chunk.request_id in answers:
                answers[chunk.request_id] += chunk.token_ids
    return answers


if __name__ == "__main__":
    test_cuda_gives_the_answers_of_the_cpu()
    print("cuda == cpu: ok", flush=True)
    test_kernels_and_graphs_give_the_answers_of_the_cpu()
    print("kernels and graphs == cpu: ok", flush=True)
    test_cancelled_and_new_requests_do_not_affect_the_others()
    print("cancels: ok")
