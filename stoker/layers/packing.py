"""The contract of layers that convert their weights to the layout of the kernels."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from stoker.kernels.cpu_int8 import Int8Kernel


@runtime_checkable
class Packable(Protocol):
    """A layer with weights of its own."""

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        """Convert the weights, once after loading. `int8` is the kernel for weights that may be requantised to 8 bits;
        None: they are dequantised. `exact`: a token's result must not depend on the other tokens of a step."""


def pack_layers(model: nn.Module, int8: Int8Kernel | None = None, exact: bool = False) -> None:
    """Pack all layers of a model, in the order of the attributes: the embedding before a head that shares it."""
    for module in model.modules():
        if module is not model and isinstance(module, Packable):
            module.pack(int8, exact)
