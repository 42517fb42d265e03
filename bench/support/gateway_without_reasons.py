"""`stoker gateway` without the cache doctor: it does not find out why prompt tokens were not cached.

    python -m bench.support.gateway_without_reasons gateway --port PORT --worker URL

Only for `doctor_cost`, which measures what the doctor costs. The arguments are those of `stoker`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import stoker.gateway.build_worker_side as build_worker_side
from stoker.cli.main import main
from stoker.fleet.lost_blocks import NoLosses
from stoker.gateway.path.app import Gateway
from stoker.gateway.path.exchange import Exchange


def no_losses(clock: Callable[[], float]) -> NoLosses:
    return NoLosses()


def no_misses(gateway: Gateway, exchange: Exchange) -> str:
    return ""


@contextmanager
def without_reasons() -> Iterator[None]:
    with patch.object(build_worker_side, "LostBlocks", no_losses), patch.object(Gateway, "_misses", no_misses):
        yield


if __name__ == "__main__":
    with without_reasons():
        sys.exit(main())
