"""The gate of flex requests keeps nothing of models that no worker serves."""

from __future__ import annotations

from stoker.gateway.admission.flex import FlexGate
from stoker.gateway.config import FlexSettings


def test_unknown_models_leave_nothing_behind() -> None:
    served = {"m": 2}
    gate = FlexGate(
        FlexSettings(idle_requests=0),
        lane=lambda model: model if model in served else None,
        num_workers=lambda lane: served.get(lane, 0),
        clock=lambda: 0.0,
    )
    for name in ("m", *(f"guess-{i}" for i in range(100))):
        gate.interactive_ended(gate.interactive_began(name))
    assert set(gate._busy_until_s) == {"m"}
    assert not gate._interactive
