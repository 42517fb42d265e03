"""cuDNN is planned in steps while the engine is idle. Here a fake takes cuDNN's place."""

from __future__ import annotations

import threading

import pytest
import torch

from stoker.kernels import dense
from stoker.kernels.dense import DensePlans


def test_while_cudnn_initialises_more_plans_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that is told that nothing is left does not ask again; then cuDNN would never be used."""
    comes_up = threading.Event()
    planned: list[int] = []

    def plan(plans: DensePlans, num_tokens: int) -> None:
        if not planned:
            assert comes_up.wait(60)
        planned.append(num_tokens)

    monkeypatch.setattr(dense, "has_dense", lambda x: True)
    monkeypatch.setattr(DensePlans, "_plan", plan)
    plans = DensePlans(torch.empty(0), [(4, 2, 16)])
    assert plans.plan_next()
    assert plans.plan_next()
    assert plans.lengths == []
    comes_up.set()
    while plans.plan_next():
        pass
    assert plans.lengths == [2048, 4096, 6144, 8192]
    assert planned[1:] == plans.lengths


def test_without_cudnn_no_plans_are_left() -> None:
    plans = DensePlans(torch.empty(0), [(4, 2, 16)])
    assert not plans.plan_next()
    plans.plan_all()
    assert plans.lengths == []
