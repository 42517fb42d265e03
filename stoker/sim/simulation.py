"""Simulation: builds a fleet from a calibration, sends it a workload, and returns what happened.

sessions ──arrive──> SimulatedGateway ──submit──> SimulatedEngine ──> SimulatedDevice
                        ^      records                │  events, reports, tokens
                        └─────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from stoker.base import garbage
from stoker.base.errors import ConfigError
from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role, WorkerSpec
from stoker.gateway.admission.admission_settings import AdmissionSettings
from stoker.routing.settings import RouterSettings
from stoker.sim.calibration import Calibration, LinkCosts, scaled
from stoker.sim.event_loop import EventLoop
from stoker.sim.faults import parse_fault, schedule_fault
from stoker.sim.records import RequestRecords
from stoker.sim.simulated_engine import SimulatedEngine
from stoker.sim.simulated_gateway import MODEL, SimulatedGateway
from stoker.sim.simulated_store import SimulatedStore, SimulatedTier
from stoker.sim.workloads.workload import SimSession, SimTurn, Workload

_GIB = 1 << 30
_MAX_WORKERS = 4096
# Of all workers. Each takes 17 bytes empty and about 1,300 when it is used, with its entry in the index.
_MAX_BLOCKS = 1 << 26
_MEDIA = {"host": "CPU", "disk": "DISK", "shared": "STORE"}
_DEFAULT_TIERS = {  # used where the calibration has none: PCIe, NVMe, and a network of 100 Gbit/s
    "host": LinkCosts(0.0005, 20e9),
    "disk": LinkCosts(0.002, 2.5e9),
    "shared": LinkCosts(0.002, 10e9),
}


@dataclass(frozen=True, slots=True)
class SimFleet:
    """How many workers there are, and what KV memory each has. None: as the calibration says."""

    unified: int = 0
    prefill: int = 0
    decode: int = 0
    kv_blocks: int | None = None
    host_gib: float = 0.0
    disk_gib: float = 0.0
    shared_gib: float = 0.0  # of one store for all workers

    def __post_init__(self) -> None:
        for name in ("unified", "prefill", "decode", "host_gib", "disk_gib", "shared_gib"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")
        if self.prefill and not self.decode and not self.unified:
            raise ConfigError(f"--prefill {self.prefill}: prefill workers need --decode workers to hand off to")
        if not 0 < self.num_workers <= _MAX_WORKERS:
            raise ConfigError(
                f"the fleet has {self.num_workers} workers; give 1 to {_MAX_WORKERS} with --unified or --decode"
            )
        if self.kv_blocks is not None and self.kv_blocks < 1:
            raise ConfigError(f"--kv-blocks {self.kv_blocks}: must be at least 1")

    @property
    def num_workers(self) -> int:
        return self.unified + self.prefill + self.decode

    def worker_ids(self) -> dict[WorkerId, Role]:
        counts = ((Role.UNIFIED, self.unified), (Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        return {WorkerId(f"{role.value}-{i}"): role for role, count in counts for i in range(count)}


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Everything that decides the outcome of a simulation, besides the workload."""

    calibration: Calibration
    fleet: SimFleet
    router: RouterSettings = field(default_factory=RouterSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    faults: tuple[str, ...] = ()
    concurrency: int | None = None  # sessions at a time; None: each starts at its own time
    session_keys: bool = True  # clients send their session's name
    seed: int = 0
    speed: float = 1.0  # factor on all step times, for the range of a prediction

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"--concurrency {self.concurrency}: must be at least 1")


@dataclass(slots=True, eq=False)
class SimOutcome:
    """What happened in a simulation."""

    config: SimConfig
    records: RequestRecords
    engines: list[SimulatedEngine]
    tiers: list[SimulatedTier]
    duration_s: float  # from the first arrival to the end of the last answer
    num_events: int


class Simulation:
    """One run. `run` may be called once."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.loop = EventLoop()
        self.records = RequestRecords()
        calibration = self._calibration()
        shape = calibration.shape
        host = calibration.host
        router, admission = config.router, config.admission
        self.gateway = SimulatedGateway(self.loop, host, shape.block_tokens, self.records, router, admission)
        self._peers: dict[str, SimulatedEngine] = {}
        self._block_bytes = shape.block_tokens * shape.kv_token_bytes
        self._shared = self._tier("shared", config.fleet.shared_gib)
        self.tiers: list[SimulatedTier] = list(self._shared)
        for number, (worker_id, role) in enumerate(config.fleet.worker_ids().items()):
            self._add_worker(worker_id, role, calibration, config.seed + number)
        for text in config.faults:
            schedule_fault(parse_fault(text, list(self.gateway.engines)), self.gateway, self.loop)
        self._waiting_sessions: Iterator[SimSession] = iter(())
        self._last_start_s = 0.0

    def _calibration(self) -> Calibration:
        config = self.config
        found, fleet = config.calibration, config.fleet
        blocks = (fleet.kv_blocks or found.shape.kv_blocks) * fleet.num_workers
        if blocks > _MAX_BLOCKS:
            raise ConfigError(
                f"{fleet.num_workers} workers with {blocks // fleet.num_workers} KV blocks each are {blocks} blocks, more than "
                f"the {_MAX_BLOCKS} that can be simulated; give fewer with --kv-blocks, or larger blocks in the calibration"
            )
        if config.speed != 1.0:
            found = msgspec.structs.replace(found, step=scaled(found.step, config.speed))
        if fleet.kv_blocks is not None:
            found = msgspec.structs.replace(
                found, shape=msgspec.structs.replace(found.shape, kv_blocks=fleet.kv_blocks)
            )
        return found

    def _tier(self, name: str, gib: float) -> list[SimulatedTier]:
        """Return a tier of this size, or nothing if the size is zero."""
        if not gib:
            return []
        costs = self.config.calibration.tiers.get(name, _DEFAULT_TIERS[name])
        return [SimulatedTier(name, _MEDIA[name], max(1, int(gib * _GIB / self._block_bytes)), costs)]

    def _add_worker(self, worker_id: WorkerId, role: Role, calibration: Calibration, seed: int) -> None:
        fleet = self.config.fleet
        own = [*self._tier("host", fleet.host_gib), *self._tier("disk", fleet.disk_gib)]
        self.tiers += own
        store = SimulatedStore([*own, *self._shared], self._block_bytes)
        engine = SimulatedEngine(worker_id, calibration, store, self.loop, self.gateway, self._peers, seed)
        self.gateway.add_worker(WorkerSpec(worker_id=worker_id, url="", role=role, models=(MODEL,)), engine)
        if self._shared:
            self.gateway.indexes[MODEL].share(worker_id, {_MEDIA["shared"]: "shared"})

    # ---- clients

    def run(self, workload: Workload) -> SimOutcome:
        """Send all sessions, and return when the last answer has ended."""
        self._waiting_sessions = workload.sessions()
        for _ in range(self.config.concurrency or 1):
            self._start_next()
        with garbage.paused():  # requests leave no cycles behind, and collections take a quarter of the time
            self.loop.run()
        records = self.records
        if not len(records):
            raise ConfigError("the workload has no requests")
        assert not self.gateway.num_open, "a request never ended"
        assert not self.gateway.load_book.totals().requests, "a reservation was not returned"
        duration_s = max(records.ended_s) - min(records.started_s)
        engines = list(self.gateway.engines.values())
        return SimOutcome(self.config, records, engines, self.tiers, duration_s, self.loop.num_events)

    def _start_next(self) -> None:
        """Schedule the next session. Only one that has not started is in memory, unless the concurrency is limited."""
        session = next(self._waiting_sessions, None)
        if session is None:
            return
        if self.config.concurrency is not None:
            self.loop.at(self.loop.now_s, lambda: self._next_turn(session, self._start_next))
            return
        if session.start_s < self._last_start_s:
            raise ConfigError(f"session {session.name}: starts at {session.start_s} s, before the session before it")
        self._last_start_s = session.start_s

        def start() -> None:
            self._start_next()
            self._next_turn(session, _nothing)

        self.loop.at(session.start_s, start)

    def _next_turn(self, session: SimSession, ended: Callable[[], None]) -> None:
        turn = next(session.turns, None)
        if turn is None:
            ended()
            return
        start_s = self.loop.now_s + turn.pause_s if turn.at_s is None else turn.at_s
        self.loop.at(start_s, lambda: self._send(session, turn, ended))

    def _send(self, session: SimSession, turn: SimTurn, ended: Callable[[], None]) -> None:
        name = session.name if self.config.session_keys else None
        if turn.at_s is None:
            self.gateway.arrive(turn, name, session.tenant, lambda: self._next_turn(session, ended))
        else:  # fixed arrivals do not wait for the answer
            self.gateway.arrive(turn, name, session.tenant, _nothing)
            self._next_turn(session, ended)


def _nothing() -> None:
    """Do nothing."""
