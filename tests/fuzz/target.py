"""FuzzTarget: what one fuzzer runs, and what must hold for each execution."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Execute = Callable[[bytes, random.Random], object]


@dataclass(frozen=True)
class FuzzTarget:
    """A function that reads untrusted bytes.

    `execute(data, rng)` raises only exceptions of `errors`, or it has a bug. It checks its own properties with `assert`. `rng` is
    seeded by `data`, so that a saved input always runs the same way: split places and the like come from it.
    """

    execute: Execute
    seeds: Callable[[], Sequence[bytes]]  # valid inputs to begin with
    errors: tuple[type[BaseException], ...] = ()
    tokens: Sequence[bytes] = ()  # pieces of the format, which the mutator inserts
    repair: Callable[[bytes], bytes] | None = None  # recomputes checksums, so that mutations get past them
    is_network: bool = True  # False: a file format, which gets a shorter campaign
    max_s: float = 2.0  # an execution that takes longer hangs
    base_bytes: int = 4 << 20  # memory that an execution may take, whatever its input
    bytes_per_input_byte: int = 200  # memory on top, for each byte of the input
    max_input_bytes: int = 64 << 10
    mutated_bytes: int | None = None  # only this many leading bytes are mutated; None: all


def target_names() -> list[str]:
    """Return the names of all targets."""
    package = importlib.import_module("tests.fuzz.targets")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def load_target(name: str) -> FuzzTarget:
    """Import one target."""
    target = importlib.import_module(f"tests.fuzz.targets.{name}").TARGET
    assert isinstance(target, FuzzTarget)
    return target


def pieces(data: bytes, rng: random.Random) -> list[bytes]:
    """Split bytes at random places: sometimes into single bytes, sometimes hardly at all."""
    longest = rng.choice((1, 2, 7, 50, 1000))
    parts, at = [], 0
    while at < len(data):
        step = rng.randint(1, longest)
        parts.append(data[at : at + step])
        at += step
    return parts
