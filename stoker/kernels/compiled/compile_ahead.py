"""Compiles kernels before their first launch, on several threads.

A forward pass on meta tensors (tensors without memory) launches the same kernels as one on the GPU. Its launches are
recorded instead of executed. Then each recorded kernel is compiled, or read from the cache, and loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KernelLaunch:
    """A kernel with the arguments of a launch. They determine what is compiled."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> Any:
        """Return the compiled kernel. Triton keeps it for later launches."""
        return self.kernel.warmup(*self.args, grid=(1,), **self.options)


@contextmanager
def recorded_launches() -> Iterator[Mapping[object, KernelLaunch]]:
    """Record this thread's launches instead of executing them, each kind once."""
    from triton.runtime.jit import JITFunction

    launches: dict[object, KernelLaunch] = {}
    launch, recorder = JITFunction.run, threading.get_ident()

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != recorder:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        given = [_kind(argument, param) for argument, param in zip(args, kernel.params, strict=False)]
        kind = (kernel, *given, *sorted((name, repr(value)) for name, value in options.items()))
        if kind not in launches:
            launches[kind] = KernelLaunch(kernel, args, options)
        return None

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = launch


def _kind(argument: Any, param: Any) -> object:
    """Return what Triton distinguishes when it compiles.

    For a tensor, this is its dtype and its alignment. For an integer, it is whether it needs 64 bits, is 1, or is a multiple
    of 16. The value of a float does not matter.
    """
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if param.is_constexpr or type(argument) not in (int, float):
        return repr(argument)
    if type(argument) is float:
        return float
    is_long = not -(1 << 31) <= argument < 1 << 31
    return is_long if param.do_not_specialize else (is_long, argument == 1, argument % 16 == 0)


def compile_all(
    launches: Sequence[KernelLaunch],
    num_threads: int,
    prepare: Callable[[Any], None],
    begin: Callable[[], None] = lambda: None,
) -> list[Exception]:
    """Compile the kernels, and call `prepare` with each one. Return the errors. Each thread calls `begin` first.

    A kernel that fails is compiled a second time without threads: Python 3.11 raises SystemError at times when several
    threads parse source code.
    """

    def compile_one(launch: KernelLaunch) -> Exception | None:
        try:
            prepare(launch.compile())
        except Exception as error:  # a launch reports it again, where it can be attributed to a step
            return error
        return None

    with ThreadPoolExecutor(num_threads, "compile", initializer=begin) as threads:
        failed = [one for one, error in zip(launches, threads.map(compile_one, launches), strict=True) if error]
    return [error for one in failed if (error := compile_one(one)) is not None]
