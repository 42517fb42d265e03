"""Every model family on a CUDA device, with sizes that the GPU's kernels take: in float32 the tokens of a CPU, in bfloat16
logprobs close to the CPU's. Runs under pytest (-m gpu), or as a script without pytest."""

from __future__ import annotations

import random
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

from tiny import SHAPES, make_tiny

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.engine.llm import LLM, LLMOutput
from stoker.sched.request import SamplingParams

WIDE = {
    "vocab_size": 997, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
LATENT = {
    **WIDE, "num_key_value_heads": 8, "head_dim": 32, "kv_lora_rank": 128, "q_lora_rank": 96, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 12, "moe_intermediate_size": 64,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "deepseek": LATENT,
    "kimi-k2.5": {**LATENT, "n_routed_experts": 16},
    "llama4-scout": {**WIDE, "num_local_experts": 4, "intermediate_size": 128, "attention_chunk_size": 48},
    "llama4-maverick": {**WIDE, "num_local_experts": 4, "intermediate_size": 128, "attention_chunk_size": 48},
    "gpt-oss": {**WIDE, "num_local_experts": 8, "intermediate_size": 128, "sliding_window": 32, "swiglu_limit": 7.0},
    "glm4-moe": {**WIDE, "moe_intermediate_size": 64},
    "minimax-m2": {**WIDE, "intermediate_size": 128, "num_local_experts": 8, "rotary_dim": 32},
}
MOST_DIFFERENCE = 0.1  # of the logprobs of tokens, on average, in bfloat16
SCHEDULES = [(0, 2000, 512), (1, 2000, 64), (1, 60, 512), (2, 40, 33)]  # steps ahead, blocks, tokens of a step


def run(folder: Path, device: str, dtype: str, numerics: str, schedule: tuple[int, int, int]) -> list[LLMOutput]:
    rng = random.Random(7)
    shared = [rng.randrange(997) for _ in range(100)]
    prompts = [
        shared[: rng.randint(0, 100)] + [rng.randrange(997) for _ in range(rng.randint(1, 60))] for _ in range(16)
    ]
    temperatures = [0.0 if dtype == "bfloat16" else 0.8 * (i % 2) for i in range(16)]
    sampling = [SamplingParams(t, seed=i, num_logprobs=i % 3 or None) for i, t in enumerate(temperatures)]
    steps_ahead, num_blocks, step_tokens = schedule
    settings = EngineSettings(
        device=device, dtype=dtype, steps_ahead=steps_ahead, num_threads=2, numerics=numerics,
        kv=KvSettings(block_tokens=16, num_blocks=num_blocks),
        sched=SchedSettings(step_tokens=step_tokens, max_rows=8),
    )  # fmt: skip
    with closing(LLM(folder, settings)) as llm:
        found = llm.generate(prompts, sampling, max_new_tokens=40)
        assert llm.built.pool.num_free == llm.built.pool.num_blocks
    return found


def check(name: str) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        make_tiny(folder, name, **SIZES.get(name, WIDE))
        expected = run(folder, "cpu", "float32", "fast", SCHEDULES[0])
        answers = [one.token_ids for one in expected]
        for numerics in ("fast", "exact"):
            for schedule in SCHEDULES:
                found = [one.token_ids for one in run(folder, "cuda", "float32", numerics, schedule)]
                same = sum(a == b for a, b in zip(found, answers, strict=True))
                assert found == answers, f"{name}: {same} of {len(answers)} in float32, {numerics=} {schedule=}"
        check_bfloat16(name, folder)


def check_bfloat16(name: str, folder: Path) -> None:
    """Both begin alike, and differ in the logprob of a token by rounding alone. Exact: no schedule changes a token."""
    expected = run(folder, "cpu", "float32", "fast", SCHEDULES[0])
    exact = [
        [one.token_ids for one in run(folder, "cuda", "bfloat16", "exact", schedule)] for schedule in SCHEDULES[:2]
    ]
    assert exact[0] == exact[1], f"{name}: the schedule changes an answer in bfloat16"
    differences = []
    for ours, theirs in zip(run(folder, "cuda", "bfloat16", "fast", SCHEDULES[1]), expected, strict=True):
        if not theirs.logprobs:
            continue
        pairs = zip(ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True)
        for our_token, their_token, our_logprobs, their_logprobs in pairs:
            if our_token != their_token:
                break
            differences.append(abs(our_logprobs.logprob - their_logprobs.logprob))
    assert len(differences) > 20, f"{name}: only {len(differences)} tokens are alike in bfloat16"
    difference = sum(differences) / len(differences)
    assert difference < MOST_DIFFERENCE, f"{name}: logprobs differ by {difference:.3f} in bfloat16"


if __name__ == "__main__":
    for name in sys.argv[1:] or SIZES:
        check(name)
        print(f"{name}: ok", flush=True)
else:

    @pytest.mark.parametrize("name", SIZES)
    def test_a_family(name: str) -> None:
        assert name in SHAPES
        check(name)
