"""Compiling for a GPU that this machine does not have."""

from __future__ import annotations

from typing import Any


class CompilingDriver:
    """Takes the place of Triton's driver. Kernels can be compiled for the GPU, and cannot be loaded or launched."""

    def __init__(self, arch: int) -> None:
        """`arch` is the GPU's compute capability, such as 90 for Hopper."""
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(arch: int) -> None:
    """Let this process compile for another GPU from now on."""
    import triton

    triton.runtime.driver.set_active(CompilingDriver(arch))
