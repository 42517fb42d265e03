"""A supervised fleet whose parts get another address whenever they are started: the parts that depend on them go on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from waiting import until

from stoker.up.part import ENDPOINT, GATEWAY_LIST, MOONCAKE, PORT, FleetPart, NodeRequest, PartKind
from stoker.up.placement.local import LocalPart
from stoker.up.process import PartProcess
from stoker.up.rotating_file import RotatingFile
from stoker.up.state import RunDir, living_fleets
from stoker.up.supervisor import Phase
from stoker.up.terminal import Terminal
from tests.up.test_fleet_run import PART, fleet_of, free_port, running


class MovingPart(LocalPart):
    """A process of this machine, which says that it runs on another one."""

    __slots__ = ("written",)

    def __init__(self, part: FleetPart, process: PartProcess, written: list[tuple[str, str, str]]) -> None:
        super().__init__(part, process)
        object.__setattr__(self, "written", written)

    @property
    def nodes(self) -> tuple[str, ...]:
        return ("10.0.0.7",)

    def write(self, file: str, text: str) -> None:
        self.written.append((self.part.name, file, text))


@dataclass
class MovingPlacement:
    """Gives each part a new port when it is started."""

    written: list[tuple[str, str, str]] = field(default_factory=list)

    def reach(self, host: str) -> str:
        return host

    async def start(self, part: FleetPart, file: RotatingFile) -> MovingPart:
        port = str(free_port())
        command = tuple({PORT: port}.get(argument, argument) for argument in part.command)
        placed = part.placed({ENDPOINT: f"127.0.0.1:{port}"})
        process = await PartProcess.start(command, os.environ, file)
        return MovingPart(replace(placed, command=command), process, self.written)

    def close(self) -> None:
        pass


def placed_part(tmp_path: Path, name: str, kind: PartKind, *arguments: str) -> FleetPart:
    lists = {GATEWAY_LIST: ("gateway",)} if kind is PartKind.WORKER else {}
    request = NodeRequest(address=ENDPOINT, health_url=f"http://{ENDPOINT}/", lists=lists)
    command = (sys.executable, "-c", PART, PORT, str(tmp_path / f"{name}-ended"), *arguments)
    addresses = dict.fromkeys(arguments, "mooncake")
    return FleetPart(name, kind, kind.value, command, "", None, 20.0, addresses=addresses, request=request)


def test_workers_follow_a_gateway_that_moves_and_are_restarted_for_a_master_that_moves(
    tmp_path: Path, run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (
        placed_part(tmp_path, "mooncake", PartKind.STORE),
        placed_part(tmp_path, "gateway", PartKind.GATEWAY),
        placed_part(tmp_path, "worker", PartKind.WORKER, MOONCAKE),
    )

    async def life() -> None:
        fleet = fleet_of(tmp_path, run_dir, Terminal(), *parts)
        placement = fleet.placement = MovingPlacement()

        async def killed_and_back(name: str) -> str:
            os.kill(fleet._processes[name].pid or 0, signal.SIGKILL)
            state = fleet.supervisor.parts[name]
            await until(lambda: state.restarts == 1 and state.phase is Phase.READY)
            return fleet._processes[name].part.address

        async with running(fleet):
            assert fleet._processes["worker"].part.command[-1] == fleet._processes["mooncake"].part.address
            gateway = await killed_and_back("gateway")
            assert placement.written == [("worker", GATEWAY_LIST, f"{gateway}\n")]
            assert fleet.gateway_url == gateway
            assert fleet.supervisor.parts["worker"].restarts == 0

            master = await killed_and_back("mooncake")
            worker = fleet.supervisor.parts["worker"]
            await until(lambda: worker.restarts == 1 and worker.phase is Phase.READY)
            assert fleet._processes["worker"].part.command[-1] == master
            assert (tmp_path / "worker-ended").exists(), "it was drained, not killed"
            await until(lambda: any(one.has_gateway(gateway) for one in living_fleets(tmp_path / "fleets")))
            (state,) = living_fleets(tmp_path / "fleets")
            assert [part.nodes for part in state.parts] == [["10.0.0.7"]] * 3

    asyncio.run(life())
    assert "worker: will be restarted, because mooncake has moved" in capsys.readouterr().err
