"""A model that is split over two GPUs gives the answers of the CPU. Its ranks are processes, which talk through NCCL. Runs under
pytest (-m gpu), or as a script without pytest. Not yet run: no machine with two GPUs has been available."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")]

from test_engine_cuda import CONFIG, answers, make_folder

from stoker.base.config import RankSettings

SPLITTABLE = {**CONFIG, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}
EXPERTS = {
    **SPLITTABLE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def _agrees(config: dict[str, object], ranks: RankSettings) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = make_folder(Path(path), config)
        for plain in (True, False):
            expected = answers(folder, "cpu", 0, 2000, 512, "float32", plain)
            for num_blocks, step_tokens in [(2000, 512), (2000, 64), (40, 512)]:
                found = answers(folder, "cuda", 1, num_blocks, step_tokens, "float32", plain, ranks)
                same = sum(a == b for a, b in zip(found, expected, strict=True))
                assert found == expected, f"{same} of {len(expected)}: {plain=} {num_blocks=} {step_tokens=}"


def test_two_stages_give_the_answers_of_the_cpu() -> None:
    """Each stage replays graphs of its own layers."""
    _agrees(SPLITTABLE, RankSettings(1, 2, 1))


def test_split_layers_give_the_answers_of_the_cpu() -> None:
    _agrees(SPLITTABLE, RankSettings(2, 1, 1))


def test_split_experts_give_the_answers_of_the_cpu() -> None:
    _agrees(EXPERTS, RankSettings(2, 1, 2))


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: ok", flush=True)
