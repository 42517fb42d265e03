"""Rotary embeddings: transformers' tables for published scalings, and heads whose rotated values are elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stoker.kernels.rope import rope, rope_tables
from stoker.layers.linear import Linear
from stoker.layers.quant import Fp8
from stoker.layers.rope import Rope, RopeConfig, half_order, inverse_frequencies, yarn_scale
from stoker.models.dense import read_rope

DEEPSEEK_V3 = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
               "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
KIMI_K25 = {**DEEPSEEK_V3, "factor": 64.0, "beta_fast": 1.0}
GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
           "beta_slow": 1.0, "truncate": False}  # fmt: skip


@pytest.mark.parametrize(
    ("scaling", "theta"), [(DEEPSEEK_V3, 10_000.0), (KIMI_K25, 50_000.0), (GPT_OSS, 150_000.0)], ids=str
)
@pytest.mark.parametrize("changes", [{}, {"mscale": 0.7}, {"attention_factor": 1.3}, {"beta_slow": 2.0}], ids=str)
def test_yarn_is_that_of_transformers(scaling: dict[str, Any], theta: float, changes: dict[str, Any]) -> None:
    parameters = {**scaling, **changes}
    parameters["rope_type"] = "yarn"
    reference = DeepseekV3Config(head_dim=64, rope_parameters={**parameters, "rope_theta": theta})
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](reference, torch.device("cpu"))
    hf = {"head_dim": 64, "rope_theta": theta, "rope_scaling": parameters}
    found = read_rope(hf, 163_840)
    assert torch.allclose(inverse_frequencies(found, 64), expected, rtol=1e-6)
    assert found.table_scale == pytest.approx(scale)


def test_the_scale_of_attention_in_published_configs() -> None:
    assert yarn_scale(40.0) == pytest.approx(1.3689, abs=1e-4)
    assert yarn_scale(64.0) ** 2 == pytest.approx(2.0047, abs=1e-4)


@pytest.mark.parametrize(
    ("width", "rotated", "interleaved"), [(16, 16, True), (16, 8, False), (12, 4, True), (8, 8, False)]
)
def test_heads_in_the_kernels_order_have_the_same_products(width: int, rotated: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    config, num_tokens = RopeConfig(100.0, rotated=rotated, table_scale=1.2), 9
    q, k = torch.randn(2, num_tokens, 3, width, dtype=torch.float64)
    cos, sin = rope_tables(inverse_frequencies(config, width), num_tokens, config.table_scale, torch.float64)
    order = list(half_order(width, rotated, interleaved))
    found = [rope(x[..., order], cos, sin) for x in (q, k)]
    expected = [checkpoint_rope(x, config, rotated, interleaved) for x in (q, k)]
    products = [torch.einsum("thd,shd->hts", *pair) for pair in (found, expected)]
    assert torch.allclose(*products)


def checkpoint_rope(x: torch.Tensor, config: RopeConfig, rotated: int, interleaved: bool) -> torch.Tensor:
    """Rotate the values of [tokens, heads, width] where the checkpoint has them."""
    frequencies = inverse_frequencies(config, rotated).double()
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), frequencies)[:, None]
    turned, kept = x[..., :rotated], x[..., rotated:]
    pairs = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    cos, sin = angles.cos() * config.table_scale, angles.sin() * config.table_scale
    return torch.cat([pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin, kept], -1)


def test_outputs_are_reordered_with_their_scales() -> None:
    torch.manual_seed(0)
    linear = Linear(128, (256, 128), stored=Fp8(128, 128, "weight_scale_inv", False))
    codes = torch.randn(384, 128).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 1)
    linear.get_parameter("weight").data.copy_(codes)
    linear.get_parameter("weight_scale_inv").data.copy_(scale)
    expected = (codes.float().view(3, 128, 128) * scale[:, :, None]).view(384, 128)
    order = [block + value for block in (0, 128) for value in (*range(0, 128, 2), *range(1, 128, 2))]
    linear.reorder(order)
    linear.pack()
    x = torch.randn(5, 128)
    assert torch.allclose(linear.plain(x), x @ torch.cat([expected[order], expected[256:]]).t(), atol=1e-4)


def test_angles_of_very_long_contexts_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    config, positions = RopeConfig(500_000.0, rotated=8, table_scale=1.2), torch.tensor([0, 7, 99, 3])
    with_tables = Rope(config, 16, 100, torch.device("cpu"))
    monkeypatch.setattr("stoker.layers.rope._MAX_TABLE_POSITIONS", 99)
    computed = Rope(config, 16, 100, torch.device("cpu"))
    assert sum(buffer.numel() for buffer in computed.buffers()) == 8
    for found, expected in zip(computed(positions), with_tables(positions), strict=True):
        assert torch.equal(found, expected)
    late = Rope(config, 16, 10_485_760, torch.device("cpu"))(torch.tensor([10_485_759]))
    assert all(part.isfinite().all() for part in late)
