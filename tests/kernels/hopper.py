"""Compiles a kernel for a Hopper GPU on a machine without one, with the arguments of its launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

SHARED_BYTES = 227 << 10  # shared memory that a program may use
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


class CompiledKernel:
    """Takes the place of a kernel: launching it compiles it instead."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.found: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *args: Any, **named: Any) -> None:
        names = self._kernel.arg_names
        constants = {name: value for name, value in named.items() if name in names}
        options = {name: value for name, value in named.items() if name not in names}
        signature, aligned = {}, {}
        for number, name in enumerate(names):
            given = args[number] if number < len(args) else None
            if isinstance(given, Tensor):
                signature[name] = _POINTERS[given.dtype]
                aligned[(number,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "constexpr" if name in constants else "fp32" if isinstance(given, float) else "i32"
        source = ASTSource(self._kernel, signature=signature, constexprs=constants, attrs=aligned)
        self.found = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
