"""Runs a fleet: carries out the supervisor's actions and reports events to it. The supervisor makes all decisions."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from stoker.base.address import split_address
from stoker.base.backoff import BackoffLimits
from stoker.base.errors import StokerError
from stoker.proto.admin_api import ADMIN_FLEET_PATH, decode_worker_list
from stoker.proto.fleet_state import FleetState, PartInfo
from stoker.up.config import UpConfig
from stoker.up.part import FleetPart, PartKind
from stoker.up.part_addresses import PartAddresses
from stoker.up.placement.contract import PlacedPart, Placement
from stoker.up.plan import FleetPlan
from stoker.up.probing import ProbePolicy
from stoker.up.rotating_file import RotatingFile
from stoker.up.scale_follower import WorkerSlot
from stoker.up.scale_link import ScaleLink
from stoker.up.state import RunDir
from stoker.up.supervisor import Phase, RestartPolicy, StartPart, StopMode, StopPart, Supervisor, describe_exit
from stoker.up.terminal import Terminal
from stoker.up.upgrade_link import UpgradeLink, upgrade_command

EXIT_INTERRUPTED = 130
_CANNOT_RUN = 127  # as a shell reports a program that does not exist
_PROBE_S = 0.1
_ANSWER_S = 2.0
_SEEN_S = 15.0  # maximum wait until the gateway has seen that the workers are ready
_LAST_LINES = 15


class FleetFailed(StokerError):
    """A process of the fleet cannot start. The message contains the end of its log."""

    code = "fleet_failed"


@dataclass(slots=True, eq=False)
class SupervisedFleet:
    """The processes of a fleet, from start to stop."""

    plan: FleetPlan
    up: UpConfig
    run_dir: RunDir
    log_dir: Path
    admin_token: str
    admin_token_file: Path
    secret_file: Path
    placement: Placement
    terminal: Terminal
    on_stopped: Callable[[], None]  # called when all parts have exited
    supervisor: Supervisor = field(init=False)
    _parts: dict[str, FleetPart] = field(init=False)
    _addresses: PartAddresses = field(init=False)
    _logs: dict[str, RotatingFile] = field(init=False)
    _processes: dict[str, PlacedPart] = field(init=False, default_factory=dict)
    _tasks: asyncio.TaskGroup = field(init=False)
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _last_lines: dict[str, list[str]] = field(init=False, default_factory=dict)
    _welcomed: bool = field(init=False, default=False)
    _started_at: float = field(init=False, default_factory=time.time)

    def __post_init__(self) -> None:
        up = self.up
        backoff = BackoffLimits(up.first_pause_s, up.longest_pause_s, healthy_s=up.healthy_s)
        restart_policy = RestartPolicy(backoff, ProbePolicy(up.silent_s), up.start_s)
        self._parts = {part.name: part for part in self.plan.parts}
        self._addresses = PartAddresses(self.plan.parts)
        max_bytes, max_files = up.log_mib * (1 << 20), up.log_files
        self._logs = {name: RotatingFile(self._log_path(name), max_bytes, max_files) for name in self._parts}
        self.supervisor = Supervisor([part.rule for part in self.plan.parts], restart_policy)

    async def run(self) -> int:
        """Run until all parts have exited. Raise FleetFailed if one could not start."""
        self._listen_to_signals()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                followers = [self._tasks.create_task(one) for one in (self._scale(), self._follow_upgrades())]
                while not self.supervisor.is_over:
                    await self._carry_out()
                    self._write_state()
                    if not self.supervisor.is_over:  # if no part was running, no exit event will come
                        await self._wait()
                for follower in followers:
                    follower.cancel()
        finally:
            for process in self._processes.values():
                process.stop(StopMode.KILL)
            for log in self._logs.values():
                log.close()
            self.on_stopped()
        self.terminal.say("all processes have exited")
        if (failure := self.supervisor.failure) is not None:
            lines = "\n  ".join(self._last_lines.get(failure.name, []))
            raise FleetFailed(
                f"{failure.name} cannot run: {failure.reason}. The end of {self._log_path(failure.name)}:\n  {lines}"
            )
        return 0 if self._welcomed else EXIT_INTERRUPTED

    async def _carry_out(self) -> None:
        for action in self.supervisor.actions(time.monotonic()):
            match action:
                case StartPart(name=name):
                    await self._start(self._addresses.resolved(name))
                case StopPart(name=name, how=how):
                    self._say_stop(name, how)
                    if (process := self._processes.get(name)) is not None:
                        process.stop(how)

    async def _wait(self) -> None:
        delay_s = self.supervisor.next_timeout_s() - time.monotonic()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), min(max(0.0, delay_s), 3600.0))
        self._changed.clear()

    # ---- parts

    async def _start(self, part: FleetPart) -> None:
        restarts = self.supervisor.parts[part.name].restarts
        self.terminal.say(f"{part.name}: {'restarting' if restarts else 'starting'}")
        try:
            process = await self.placement.start(part, self._logs[part.name])
        except OSError as error:
            self._last_lines[part.name] = [f"{error.filename or part.command[0]}: {error.strerror}"]
            self._exited(part.name, _CANNOT_RUN)
            return
        if (problem := self._logs[part.name].problem) is not None:
            self.terminal.say(f"{problem}; log lines are lost until this is repaired")
        self._processes[part.name] = process
        self._tasks.create_task(self._live(part, process))

    async def _live(self, part: FleetPart, process: PlacedPart) -> None:
        """Probe the process until it is ready, and from then on until it exits."""
        probe = asyncio.create_task(self._probe(part, process))
        try:
            code = await process.wait()
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
        del self._processes[part.name]
        self._last_lines[part.name] = process.log.last_lines(_LAST_LINES)
        self._exited(part.name, code)

    def _exited(self, name: str, code: int) -> None:
        self.supervisor.exited(name, code, time.monotonic())
        state = self.supervisor.parts[name]
        if state.phase is Phase.PAUSED:
            pause_s = state.timeout_at_s - time.monotonic()
            self.terminal.say(f"{name}: exited {describe_exit(code)}; restarting it in {max(0.0, pause_s):.1f} s")
        self._changed.set()

    async def _probe(self, part: FleetPart, process: PlacedPart) -> None:
        await self._until_ready(part, process)
        if process.part.health_url is not None:
            await self._keep_probing(part.name, process.part.health_url)

    async def _keep_probing(self, name: str, url: str) -> None:
        supervisor, policy = self.supervisor, self.supervisor.probes.policy
        timeout = aiohttp.ClientTimeout(total=policy.answer_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await asyncio.sleep(policy.every_s)
                asked_s = time.monotonic()
                was_silent = supervisor.probes.silent_s(name) > 0
                answered = await _reacts(session, url)
                supervisor.probed(name, answered=answered, asked_s=asked_s, now=time.monotonic())
                if was_silent or not answered:
                    self._changed.set()

    async def _until_ready(self, part: FleetPart, process: PlacedPart) -> None:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not await _is_ready(session, process.part):
                if part.kind is PartKind.WORKER or not process.part.address:
                    for line in process.log.new_lines():
                        self.terminal.say(f"{part.name}: {line}")
                await asyncio.sleep(_PROBE_S)
        self.supervisor.ready(part.name, time.monotonic())
        self.terminal.say(f"{part.name}: ready at {process.part.address}")
        self._tell_dependants(part.name, process.part.address)
        self._changed.set()
        if self.supervisor.all_ready and not self._welcomed and not self.supervisor.stopping:
            self._welcomed = True
            self._tasks.create_task(self._welcome())

    def _tell_dependants(self, name: str, address: str) -> None:
        """Give a part's address to the parts that depend on it, if it has changed."""
        move = self._addresses.learn(name, address)
        for change in move.changes:
            if (process := self._processes.get(change.part)) is not None:
                process.write(change.file, change.text)
        for outdated in move.outdated:
            self.terminal.say(f"{outdated}: will be restarted, because {name} has moved")
            self.supervisor.renew(outdated)

    async def _welcome(self) -> None:
        await self._until_seen()
        if self.supervisor.stopping:
            return
        places = {name: process.where for name, process in self._processes.items()}
        rows = [
            (part.name, part.role, part.address, places.get(part.name, "-"), self._log_path(part.name).name)
            for part in self._used_parts()
        ]
        self.terminal.welcome(self.plan, self.gateway_url, str(self.admin_token_file), rows, str(self.log_dir))

    @property
    def gateway_url(self) -> str:
        """The first gateway's address, or an empty text if it never ran."""
        return next((self._addresses.of(part.name) for part in self.plan.gateways), "")

    def _placed_parts(self) -> list[FleetPart]:
        """Return all parts, with the addresses of those that run."""
        return [self._processes[name].part if name in self._processes else part for name, part in self._parts.items()]

    def _used_parts(self) -> list[FleetPart]:
        """Return the parts that belong to the fleet now."""
        return [part for part in self._placed_parts() if self.supervisor.parts[part.name].phase is not Phase.UNUSED]

    async def _until_seen(self) -> None:
        """Wait until all gateways know that all workers are ready."""
        until = time.monotonic() + _SEEN_S
        headers = {"Authorization": f"Bearer {self.admin_token}"}
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            for part in self.plan.gateways:
                while time.monotonic() < until and not self.supervisor.stopping:
                    if await self._sees_all(session, self._addresses.of(part.name)):
                        break
                    await asyncio.sleep(_PROBE_S)

    async def _sees_all(self, session: aiohttp.ClientSession, gateway_url: str) -> bool:
        """Return True if the gateway knows that all workers are ready."""
        expected = {urlsplit(part.address).netloc for part in self._used_parts() if part.kind is PartKind.WORKER}
        with suppress(aiohttp.ClientError, msgspec.MsgspecError, TimeoutError, OSError):
            async with session.get(f"{gateway_url}{ADMIN_FLEET_PATH}", ssl=False) as answer:
                workers = decode_worker_list(await answer.read()).workers
                return expected <= {one.worker for one in workers if one.usable and one.models}
        return False

    # ---- what the gateway asks for

    async def _scale(self) -> None:
        """Follow the gateway's autoscaler, if it starts and ends workers."""
        if self.plan.is_scaled:
            dry_run = self.up.scale == "dry_run"
            await ScaleLink(lambda: self.gateway_url, self.admin_token, self, self.terminal.say, dry_run).run()

    async def _follow_upgrades(self) -> None:
        """Upgrade the workers when the dashboard asks for it."""
        token_file = str(self.admin_token_file)
        link = UpgradeLink(
            lambda: self.gateway_url,
            self.admin_token,
            lambda: upgrade_command(self.gateway_url, token_file),
            self.terminal.say,
        )
        await link.run()

    def slots(self) -> list[WorkerSlot]:
        """Return all workers that run or could run."""
        workers = [part for part in self._placed_parts() if part.kind is PartKind.WORKER]
        return [self._slot(part) for part in workers]

    def _slot(self, part: FleetPart) -> WorkerSlot:
        state = self.supervisor.parts[part.name]
        worker = urlsplit(part.address).netloc
        return WorkerSlot(part.name, part.role, state.phase, worker, state.start_failures, state.start_failure)

    def bring(self, name: str) -> None:
        self.supervisor.bring(name, time.monotonic())
        self._changed.set()

    def release(self, name: str) -> None:
        self.supervisor.release(name, time.monotonic())
        self._changed.set()

    # ---- signals, messages and state.json

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP, and so does the fleet then
                loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self.supervisor.stop()
        self._changed.set()

    def _say_stop(self, name: str, how: StopMode) -> None:
        if self._parts[name].kind is PartKind.GATEWAY and how is StopMode.DRAIN and self._welcomed:
            who = "the gateway" if len(self.plan.gateways) == 1 else name
            self.terminal.say(f"stopping: {who} finishes running requests; press Ctrl-C again to stop now")
        elif silent_s := self.supervisor.probes.silent_s(name):
            self.terminal.say(f"{name}: killed, because it answered no health check for {silent_s:.0f} s")
        elif how is not StopMode.DRAIN:
            self.terminal.say(f"{name}: {'stopping now' if how is StopMode.NOW else 'killed'}")

    def _log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def _write_state(self) -> None:
        parts = []
        for part in self._used_parts():
            name = part.name
            known, process = self.supervisor.parts[name], self._processes.get(name)
            parts.append(
                PartInfo(
                    name=name,
                    kind=part.kind.value,
                    role=part.role,
                    address=part.address,
                    phase=known.phase.value,
                    pid=None if process is None else process.pid,
                    nodes=[] if process is None else list(process.nodes),
                    restarts=known.restarts,
                    answers=known.phase is not Phase.READY or self.supervisor.probes.silent_s(name) == 0,
                    hangs=known.hangs,
                    last_code=known.last_code,
                    log=str(self._log_path(name)),
                )
            )
        state = FleetState(
            pid=os.getpid(),
            started_at=self._started_at,
            gateway_url=self.gateway_url,
            admin_token_file=str(self.admin_token_file),
            secret_file=str(self.secret_file),
            store_name=self.plan.store_name,
            log_dir=str(self.log_dir),
            models=list(self.plan.models),
            parts=parts,
        )
        try:
            self.run_dir.write_state(state)
        except OSError as error:  # a full disk must not stop the fleet
            path = error.filename or self.run_dir.path
            self.terminal.say(f"{path}: {error.strerror}; `stoker status` shows an older state")


async def _is_ready(session: aiohttp.ClientSession, part: FleetPart) -> bool:
    if not part.address:  # it is not known yet where it runs
        return False
    try:
        if part.ready_path is None:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*split_address(part.address)), _ANSWER_S)
            writer.close()
            return True
        async with session.get(part.address + part.ready_path, ssl=False) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def _reacts(session: aiohttp.ClientSession, url: str) -> bool:
    """Return True if the process does anything with a request, even if it refuses it. One that hangs does nothing."""
    try:
        async with session.get(url, ssl=False) as answer:
            await answer.read()
    except TimeoutError:
        return False
    except (aiohttp.ClientError, OSError):
        return True
    return True
