"""The contract of what ranks exchange on their devices.

All ranks of a group call the same methods in the same order. Sums are added in the order of the ranks, so that the result
does not depend on arrival, and is the same for processes (gloo.py) and for threads of one process (threads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class ExchangeFailed(RuntimeError):
    """An exchange with other ranks failed, nearly always because one of them has ended. Which one is found by its
    heartbeat."""


@contextmanager
def exchanging() -> Iterator[None]:
    """Raise ExchangeFailed for an error of a collective in the block."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeFailed(str(error).partition(". This is")[0] or type(error).__name__) from error


class Transfer(Protocol):
    """A tensor on its way between two ranks. Its memory must not be used or changed before `wait` returns."""

    def wait(self) -> object: ...


@dataclass(frozen=True, slots=True)
class LateTransfer:
    """A transfer that is made when it is waited for."""

    make: Callable[[], None]

    def wait(self) -> None:
        self.make()


class Collectives(Protocol):
    """The connections of one rank to the others of a group. `num_ranks` counts them all, `rank` is this one."""

    rank: int
    num_ranks: int

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in their order. All have the same shape and dtype."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks. The memory of x may be reused."""

    def swap(self, x: Tensor) -> list[Tensor]:
        """Send part i of x [ranks, ...] to rank i. Return the parts that the ranks sent here, in their order."""

    def send(self, x: Tensor, rank: int) -> Transfer:
        """Start to send a tensor to a rank. Tensors between two ranks arrive in order."""

    def receive(self, into: Tensor, rank: int) -> Transfer:
        """Start to receive a tensor from a rank. Tensors of one rank are received, and waited for, in the order of their start."""

    def close(self) -> None:
        """Give up the connections. Ranks that wait get an error."""


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """Add tensors in their order. The first one's memory is reused."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total
