"""The gateway of `doctor_cost` that has no cache doctor."""

from __future__ import annotations

from bench.support.gateway_without_reasons import without_reasons
from stoker.fleet.lost_blocks import LostBlocks, NoLosses
from stoker.gateway import build_worker_side


def test_the_parts_that_it_replaces_exist() -> None:
    with without_reasons():
        assert isinstance(build_worker_side.LostBlocks(lambda: 0.0), NoLosses)
    assert build_worker_side.LostBlocks is LostBlocks
