"""The gate of flex requests: what it counts, and what it keeps."""

from __future__ import annotations

import asyncio

from stoker.base.clock import VirtualClock
from stoker.base.errors import Overloaded
from stoker.base.ids import WorkerId
from stoker.fleet.load_book import LoadBook
from stoker.gateway.admission.admission_settings import FlexSettings
from stoker.gateway.admission.flex import FlexGate
from stoker.gateway.watch.other_work import OtherWork
from stoker.proto.work import work_header
from stoker.worker.open_work import OpenWork


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


def test_the_requests_of_other_gateways_count() -> None:
    clock, worker = VirtualClock(), WorkerId("w:1")
    view, work = OtherWork(LoadBook(), "g1"), OpenWork()
    work.publish = lambda change: view.saw(worker, [change], None, clock.now())
    gate = FlexGate(
        FlexSettings(wait_s=0.01, quiet_s=0.5, concurrency=2),
        lane=lambda model: model,
        num_workers=lambda lane: 1,
        clock=clock.now,
        others=lambda lane: view.load(worker),
    )
    view.on_interactive = gate.other_began
    preempted: list[str] = []

    async def flex_runs() -> bool:
        try:
            (await gate.enter("m", None)).end()
        except Overloaded:
            return False
        return True

    async def story() -> None:
        clock.advance(10.0)
        slot = await gate.enter("m", lambda: preempted.append("m"))
        theirs = work.accept(work_header("g2", 5, 5, is_flex=True), 5, 5)
        assert preempted == []
        assert not await flex_runs()  # two run, with that of the other gateway
        theirs.end()
        assert await flex_runs()
        interactive = work.accept(work_header("g2", 5, 5), 5, 5)
        assert preempted == ["m"]
        slot.end()
        assert not await flex_runs()
        interactive.end()
        assert not await flex_runs()  # not quiet for long enough
        clock.advance(0.6)
        assert await flex_runs()
        own = work.accept(work_header("g1", 5, 5), 5, 5)  # counted when it arrived here
        assert await flex_runs()
        own.end()

    asyncio.run(story())
