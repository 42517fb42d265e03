"""A supervised fleet of trivial processes keeps running without a terminal, without its logs, and on a full disk."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from waiting import until

from stoker.base.bound_socket import bound_socket
from stoker.up.config import UpConfig
from stoker.up.part import FleetPart, PartKind
from stoker.up.placement.local import LocalPlacement
from stoker.up.plan import FleetPlan, Listening
from stoker.up.run import FleetFailed, SupervisedFleet
from stoker.up.state import RunDir, living_fleets
from stoker.up.supervisor import Phase
from stoker.up.terminal import Terminal

# Ready at once. On SIGTERM it writes a file before it exits, which it could not do if it were killed.
PART = """
import pathlib, signal, socket, sys
kept = socket.create_server(("127.0.0.1", int(sys.argv[1])))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path(sys.argv[2]).write_text("asked")))
while True:
    kept.accept()[0].close()
"""


def free_port() -> int:
    with bound_socket("127.0.0.1", 0) as one:
        return int(one.getsockname()[1])


def part_of(tmp_path: Path, name: str, kind: PartKind, program: str = PART) -> FleetPart:
    port = free_port()
    command = (sys.executable, "-c", program, str(port), str(tmp_path / "ended"))
    address = f"127.0.0.1:{port}"
    return FleetPart(name, kind, kind.value, command, address, None, stop_s=20.0, health_url=f"http://{address}/")


def fleet_of(
    tmp_path: Path, run_dir: RunDir, terminal: Terminal, *parts: FleetPart, first_pause_s: float = 0.01
) -> SupervisedFleet:
    parts = parts or (part_of(tmp_path, "one", PartKind.STORE),)
    return SupervisedFleet(
        plan=FleetPlan(parts, Listening("127.0.0.1", 9), {}, None, (), False),
        up=UpConfig(first_pause_s=first_pause_s, log_mib=1e-6, silent_s=2.0),
        run_dir=run_dir,
        log_dir=tmp_path / "logs",
        admin_token="",
        admin_token_file=tmp_path / "token",
        secret_file=tmp_path / "secret",
        placement=LocalPlacement(os.environ),
        terminal=terminal,
        on_stopped=lambda: None,
    )


@asynccontextmanager
async def running(fleet: SupervisedFleet) -> AsyncIterator[None]:
    """Stop the fleet when the block is left. Its exceptions are raised here."""
    life = asyncio.create_task(fleet.run())
    try:
        await until(lambda: fleet.supervisor.all_ready or life.done())
        yield
        if not life.done():
            os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await life in (0, 130)
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


async def killed_and_back(fleet: SupervisedFleet) -> None:
    state = fleet.supervisor.parts["one"]
    os.kill(fleet._processes["one"].pid, signal.SIGKILL)
    await until(lambda: (state.restarts == 1 and state.phase is Phase.READY) or fleet.supervisor.stopping)
    assert not fleet.supervisor.stopping


def test_a_fleet_with_a_closed_terminal_still_stops_in_order(tmp_path: Path, run_dir: RunDir) -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as nobody:
        os.close(reader)  # a terminal that was closed, a `tee` that Ctrl-C ended first

        async def life() -> None:
            async with running(fleet_of(tmp_path, run_dir, Terminal(nobody, nobody))):
                pass

        asyncio.run(life())
    assert (tmp_path / "ended").read_text() == "asked"


def test_removed_logs_do_not_stop_the_fleet(tmp_path: Path, run_dir: RunDir) -> None:
    async def life() -> None:
        fleet = fleet_of(tmp_path, run_dir, Terminal())
        async with running(fleet):
            for log in (tmp_path / "logs").iterdir():
                log.unlink()
            (tmp_path / "logs").rmdir()
            await killed_and_back(fleet)

    asyncio.run(life())
    assert (tmp_path / "logs" / "one.log").exists()


def test_an_unwritable_state_file_does_not_stop_the_fleet(
    tmp_path: Path, run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    async def life() -> None:
        fleet = fleet_of(tmp_path, run_dir, Terminal())
        async with running(fleet):
            run_dir.path.rename(tmp_path / "elsewhere")
            await killed_and_back(fleet)

    asyncio.run(life())
    assert "No such file or directory; `stoker status` shows an older state" in capsys.readouterr().err


def test_a_part_that_cannot_start_is_reported_at_once(tmp_path: Path, run_dir: RunDir) -> None:
    async def life() -> None:
        async with asyncio.timeout(30):
            one = part_of(tmp_path, "one", PartKind.STORE, "raise SystemExit('no secret')")
            two = part_of(tmp_path, "two", PartKind.GATEWAY)
            await fleet_of(tmp_path, run_dir, Terminal(), one, two).run()

    with pytest.raises(FleetFailed, match=r"one cannot run: it exited with code 1 before it was ready.*\n +no secret"):
        asyncio.run(life())


def test_a_stopped_part_is_killed_and_restarted(
    tmp_path: Path, run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    async def life() -> None:
        fleet = fleet_of(tmp_path, run_dir, Terminal())
        state = fleet.supervisor.parts["one"]
        async with running(fleet):
            os.kill(fleet._processes["one"].pid, signal.SIGSTOP)
            await until(
                lambda: any(not part.answers for one in living_fleets(tmp_path / "fleets") for part in one.parts)
            )
            await until(lambda: state.restarts == 1 and state.phase is Phase.READY)
            assert state.hangs == 1

    asyncio.run(life())
    assert "one: killed, because it answered no health check for 2 s" in capsys.readouterr().err


def test_a_fleet_can_be_stopped_while_its_last_part_waits_for_a_restart(tmp_path: Path, run_dir: RunDir) -> None:
    async def life() -> None:
        fleet = fleet_of(tmp_path, run_dir, Terminal(), first_pause_s=20.0)
        async with running(fleet):
            os.kill(fleet._processes["one"].pid, signal.SIGKILL)
            await until(lambda: fleet.supervisor.parts["one"].phase is Phase.PAUSED)

    asyncio.run(life())
