"""A model that the GPU kernels cannot compute is refused by the name of the layer and the limit, before weights are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.support.model_shapes import LLAMA_8B, QUANTIZED, SHAPES
from stoker.base.errors import ModelFilesError
from stoker.engine import kernel_limits
from stoker.engine.kernel_limits import check_limits, explain_kernel_error
from stoker.models.family import family_of

CPU = torch.device("cpu")


def check(config: dict[str, Any]) -> None:
    family = family_of(config | {"num_hidden_layers": 1}, "config.json")
    with torch.device("meta"):
        model = family.build(64)
    check_limits(model, family.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_published_shapes_pass(shape):
    check(SHAPES[shape])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 1024, "num_key_value_heads": 1024, "head_dim": 16}, r"num_key_value_heads is 1,024, .* 512"),
        ({"num_attention_heads": 512, "num_key_value_heads": 1}, r"num_attention_heads / .* is 512, .* at most 256"),
        ({"num_attention_heads": 256, "num_key_value_heads": 1, "head_dim": 256}, r"is 256, .* at most 128"),
        ({"vocab_size": 1 << 25}, r"head: the number of outputs is 33,554,432, .* at most 33,554,431"),
        ({"vocab_size": 1 << 25, "tie_word_embeddings": True}, r"head: the number of outputs"),
        ({"intermediate_size": 1 << 25}, r"layers\.0\.mlp\.gate_up: the number of outputs is 67,108,864"),
        ({"hidden_size": 131072}, r"layers\.0\.attention_norm: the number of inputs is 131,072, .* 65,536; .*--device cpu"),
    ],
)  # fmt: skip
def test_a_size_beyond_a_limit_is_named(changes, message):
    with pytest.raises(ModelFilesError, match=message) as found:
        check(LLAMA_8B | changes)
    assert found.value.code == "unsupported_shape"


def test_4_bit_scales_have_a_limit_too():
    wide = {"hidden_size": 1 << 16, "intermediate_size": 1 << 21, "quantization_config": QUANTIZED["int4"]}
    with pytest.raises(ModelFilesError, match=r"layers\.0\.mlp\.gate_up: the number of scales is 4,294,967,296"):
        check(LLAMA_8B | wide)


def test_a_kernel_that_does_not_fit_the_gpu_is_explained(monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")
    from stoker.kernels import linear
    from stoker.layers.norm import RMSNorm

    def fail(*args: Any) -> None:
        raise errors.OutOfResources(328704, 232448, "shared memory")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(linear, "rms_norm", fail)
    with torch.device("meta"):
        model = family_of(LLAMA_8B | {"num_hidden_layers": 2}, "config.json").build(64)
        layer = model.layers[1].mlp.gate_up
        layer.pack()
        with pytest.raises(errors.OutOfResources) as found:
            layer(torch.empty(128, 4096), RMSNorm(4096, 1e-5))
    explained = explain_kernel_error(found.value, model, CPU)
    assert explained is not None
    assert explained.message.startswith("layers.1.mlp.gate_up: the kernel norm_linear cannot run on NVIDIA H200")
    assert "Required: 328704, Hardware limit: 232448" in explained.message
    assert kernel_limits.explain_kernel_error(ValueError("other"), model, CPU) is None
