"""With numerics=exact on a GPU, the bits of a row do not depend on the other rows. Runs under pytest (-m gpu), or as a
script without pytest."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

from kernels import exact_cases
from kernels.moe_cases import Shape

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.engine.llm import LLM
from stoker.kernels.reach import Reach
from stoker.sched.request import SamplingParams

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
COUNTS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 200, 256, 257, 300, 512, 1000, 2100)


def test_matmuls() -> None:
    for num_outs, num_ins in [(6144, 4096), (4096, 4096), (4096, 14336), (960, 576), (576, 1536), (1000, 712)]:
        for add in (False, True):
            exact_cases.exact_matmul(num_outs, num_ins, CUDA, BF16, COUNTS, add=add)
    exact_cases.exact_matmul(300, 712, CUDA, torch.float32, COUNTS[:16])


def test_quantised_matmuls() -> None:
    for num_outs, num_ins in [(6144, 4096), (4096, 14336), (1024, 768)]:
        exact_cases.exact_quant_matmul(num_outs, num_ins, CUDA, BF16, COUNTS)


def test_attention() -> None:
    lengths = (5000, 45, 300, 17, 1024, 20_000)
    for heads in [(32, 8, 128), (9, 3, 64), (32, 4, 128), (64, 8, 128), (16, 1, 64), (4, 4, 64)]:
        exact_cases.verified_attention(*heads, CUDA, BF16, lengths=lengths, deep=True)
        exact_cases.chunked_attention(*heads, CUDA, BF16)
    for kv_dtype in (torch.float8_e4m3fn, torch.int8):
        exact_cases.verified_attention(32, 8, 128, CUDA, BF16, kv_dtype, lengths, deep=True)
        exact_cases.chunked_attention(32, 8, 128, CUDA, BF16, kv_dtype)
    exact_cases.fast_verified_attention(32, 8, 128, CUDA, BF16)
    for reach in (Reach(window=128), Reach(chunk=300)):
        exact_cases.verified_attention(64, 8, 64, CUDA, BF16, None, lengths, True, reach, True)
        exact_cases.chunked_attention(64, 8, 64, CUDA, BF16, None, reach, True)
        exact_cases.fast_verified_attention(40, 8, 128, CUDA, BF16, None, reach)


def test_experts() -> None:
    shape = Shape(2048, 768, 128, 8, granule=64)
    exact_cases.exact_experts(shape, CUDA, BF16, COUNTS)
    for form, in_codes in [
        ("fp8 channels", True),
        ("fp8 blocks", True),
        ("fp8 channels", False),
        ("int4 groups of 32", False),
    ]:
        exact_cases.exact_experts(shape, CUDA, BF16, COUNTS[:20], form, in_codes)


BASE = {
    "vocab_size": 997, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "dense": {**BASE, "architectures": ["Qwen3ForCausalLM"]},
    "experts": {
        **BASE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 192, "norm_topk_prob": True,
    },
}  # fmt: skip


def answers(config: dict[str, object], batch: int, drafter: str, steps_ahead: int) -> list[list[int]]:
    """Greedy and sampled answers to prompts that repeat themselves, so that drafts are accepted, `batch` at a time."""
    rng = random.Random(5)
    prompts = [[rng.randrange(997) for _ in range(rng.randint(2, 20))] * rng.randint(1, 6) for _ in range(24)]
    sampling = [SamplingParams(temperature=0.8 * (i % 2), seed=i) for i in range(len(prompts))]
    settings = EngineSettings(
        device="cuda", numerics="exact", drafter=drafter, steps_ahead=steps_ahead,
        kv=KvSettings(block_tokens=16, num_blocks=2000), sched=SchedSettings(max_rows=32),
    )  # fmt: skip
    found: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(folder, settings, random_weights_seed=0)
        for first in range(0, len(prompts), batch):
            mine = slice(first, first + batch)
            found += [list(one.token_ids) for one in llm.generate(prompts[mine], sampling[mine], max_new_tokens=60)]
        llm.close()
    return found


def test_batches_and_drafts_do_not_change_a_token() -> None:
    """Whole prompts are prefilled in one chunk here."""
    for name, config in MODELS.items():
        expected = answers(config, 1, "off", 0)
        for batch, drafter, steps_ahead in [(24, "off", 1), (1, "ngram", 0), (8, "ngram", 1), (24, "auto", 1)]:
            found = answers(config, batch, drafter, steps_ahead)
            same = sum(a == b for a, b in zip(found, expected, strict=True))
            assert found == expected, f"{name}, {batch=} {drafter=} {steps_ahead=}: {same} of {len(expected)} agree"


if __name__ == "__main__":
    for test in (
        test_matmuls, test_quantised_matmuls, test_attention, test_experts, test_batches_and_drafts_do_not_change_a_token,
    ):  # fmt: skip
        torch.manual_seed(0)
        test()
        print(f"{test.__name__}: ok", flush=True)
