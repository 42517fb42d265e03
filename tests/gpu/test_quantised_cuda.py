"""Quantised checkpoints on a GPU give what transformers computes from the dequantised weights, within the precision of
bfloat16 and, where the scheme has them, 8-bit inputs. Runs under pytest (-m gpu), or as a script without pytest."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

from tiny_quantised import SCHEMES, make, make_moe, worst_difference

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.engine.llm import LLM

# Limits for log-probabilities; without 8-bit inputs the difference is 0.03. Noise also makes tokens choose other
# experts.
MOST_DIFFERENCE, MOST_WITH_EXPERTS = 0.3, 0.6


def difference(scheme: str, has_experts: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        reference = make_moe(Path(folder), scheme) if has_experts else make(Path(folder), scheme)
        sched, kv = SchedSettings(512, max_rows=4), KvSettings(64, num_blocks=16)
        llm = LLM(Path(folder), EngineSettings(device="cuda", dtype="bfloat16", kv=kv, sched=sched))
    # One prompt for the path of few rows, and one for that of many.
    return max(
        worst_difference(llm, reference, prompt) for prompt in ([5, 17, 150, 3], [7 * i % 199 for i in range(150)])
    )


def check(schemes: list[str], has_experts: bool) -> None:
    found = {scheme: difference(scheme, has_experts) for scheme in schemes}
    print(" ".join(f"{scheme}: {worst:.3f}" for scheme, worst in found.items()), flush=True)
    assert max(found.values()) < (MOST_WITH_EXPERTS if has_experts else MOST_DIFFERENCE), found


def test_quantised_checkpoints() -> None:
    check(list(SCHEMES), has_experts=False)


def test_quantised_experts() -> None:
    check(list(SCHEMES), has_experts=True)


if __name__ == "__main__":
    for has_experts in (False, True):
        check(sys.argv[1:] or list(SCHEMES), has_experts)
