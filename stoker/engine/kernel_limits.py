"""Refuses models that the GPU kernels cannot compute, before any weight is read, and explains a kernel that does not
compile for a model.

The limits are those of 32-bit offsets, of counters and of a program's registers. Published models are far below them. On
a CPU there are none. Layers of experts check their own (kernels/moe_tile_model.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import torch
from torch import nn

from stoker.base.errors import ModelFilesError
from stoker.kernels.norm import MAX_WIDTH
from stoker.kernels.paged import MAX_KV_HEADS, MAX_SHARED_VALUES
from stoker.kernels.quant import GROUP, MAX_INT4_PAIRS
from stoker.kernels.skinny import MAX_SIZE
from stoker.layers.linear import Linear, TiedLinear
from stoker.layers.norm import RMSNorm
from stoker.models.family import Model, ModelShape

_CODE = "unsupported_shape"


def check_limits(model: Model, shape: ModelShape) -> None:
    """Raise ModelFilesError if a size of the model is beyond a limit of the GPU kernels. It names the layer."""
    assert isinstance(model, nn.Module)
    for what, size, most in (*_attention_sizes(shape), *_layer_sizes(model)):
        if size > most:
            raise ModelFilesError(
                f"{what} is {size:,}, and the GPU kernels support at most {most:,}; serve this model on a CPU "
                "(--device cpu)",
                code=_CODE,
            )


def _attention_sizes(shape: ModelShape) -> Iterator[tuple[str, int, int]]:
    yield "config.json: num_key_value_heads", shape.num_kv_heads, MAX_KV_HEADS
    shared = "config.json: num_attention_heads / num_key_value_heads"
    yield shared, shape.num_heads // shape.num_kv_heads, max(1, MAX_SHARED_VALUES // shape.head_dim)


def _layer_sizes(model: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Return the sizes of all layers. Layers of one shape have the same sizes, and the first of them is named."""
    for name, module in model.named_modules():
        match module:
            case RMSNorm():
                yield f"{name}: the number of inputs", len(module.weight), MAX_WIDTH
            case Linear() | TiedLinear():
                outs, ins = module.shape
                yield f"{name}: the number of outputs", outs, MAX_SIZE
                yield f"{name}: the number of inputs", ins, MAX_SIZE
                if isinstance(module, Linear) and module.kind == "int4":
                    yield f"{name}: the number of scales", outs * ins // (2 * GROUP), MAX_INT4_PAIRS


def explain_kernel_error(error: Exception, model: Model, device: torch.device) -> ModelFilesError | None:
    """Return a ModelFilesError that names the layer whose kernel cannot run on this GPU, or None if the error is about
    something else."""
    from triton.errors import TritonError

    if not isinstance(error, TritonError):
        return None
    layer, kernel = _place(error.__traceback__, model)
    reason = " ".join(str(error).split())[:300]
    return ModelFilesError(
        f"{layer}: the kernel {kernel} cannot run on {torch.cuda.get_device_name(device)} with the shape of this model: "
        f"{reason}",
        code=_CODE,
    )


def _place(trace: TracebackType | None, model: Model) -> tuple[str, str]:
    """Return the innermost layer of the model in a traceback, and the function of a kernel's file that was called."""
    assert isinstance(model, nn.Module)
    names = {id(module): name for name, module in model.named_modules()}
    layer, kernel = "the model", "of a step"
    while trace is not None:
        frame = trace.tb_frame
        layer = names.get(id(frame.f_locals.get("self")), "") or layer
        if frame.f_globals.get("__name__", "").startswith("stoker.kernels."):
            kernel = frame.f_code.co_name
        trace = trace.tb_next
    return layer, kernel
