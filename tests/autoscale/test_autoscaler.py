"""The autoscaler on a simple model of a fleet: it follows the load, and passes the known failures of other autoscalers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from stoker.autoscale.autoscaler import Autoscaler
from stoker.autoscale.decision import Action, Flip, Keep, Start, Stop
from stoker.autoscale.sample import FleetSample, WorkerSample
from stoker.autoscale.settings import AutoscaleSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role

SETTINGS = AutoscaleSettings(
    mode="on", interval_s=1.0, confirm=3, hold_s=10.0, reverse_s=60.0, warm_s=10.0, max_workers=8
)
TOKENS_PER_S = 10_000.0  # prefill speed of one worker
STEP_S = 0.002  # of one sequence; a step takes this much longer for each


@dataclass
class Model:
    """A fleet whose queues and steps follow from the traffic by arithmetic."""

    roles: dict[WorkerId, Role]
    settings: AutoscaleSettings = SETTINGS
    can_start: bool = True
    start_takes_s: float = 5.0
    cold_step_s: float | None = None  # what a worker measures in its first seconds
    since: dict[WorkerId, float] = field(default_factory=dict)
    stopping: dict[WorkerId, float] = field(default_factory=dict)
    starting: list[tuple[float, Role]] = field(default_factory=list)
    queued: float = 0.0
    now: float = 0.0
    actions: list[tuple[float, Action]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scaler = Autoscaler(self.settings)
        self.since = dict.fromkeys(self.roles, -1000.0)

    def count(self, role: Role) -> int:
        return sum(one is role for one in self.roles.values())

    def run(self, seconds: int, tokens_per_s: float, running: int, ttft_s: float | None = None) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self._change()
            rate = TOKENS_PER_S * (self.count(Role.PREFILL) + self.count(Role.UNIFIED))
            self.queued = max(0.0, self.queued + tokens_per_s - rate)
            sample = self.sample(tokens_per_s, running, ttft_s)
            decision = self.scaler.decide(sample, self.now)
            assert decision.reason
            assert all(math.isfinite(number) for number in decision.numbers.values())
            self.do(decision.action, sample)
            self.sizes.append(len(self.roles) + len(self.starting))

    def _change(self) -> None:
        for when, role in [one for one in self.starting if one[0] <= self.now]:
            self.starting.remove((when, role))
            name = WorkerId(f"new-{self.now:g}")
            self.roles[name], self.since[name] = role, self.now
        for name in [name for name, when in self.stopping.items() if when <= self.now]:
            del self.stopping[name], self.roles[name]

    def sample(self, tokens_per_s: float, running: int, ttft_s: float | None = None) -> FleetSample:
        prefills = [name for name, role in self.roles.items() if role is not Role.DECODE]
        decodes = [name for name, role in self.roles.items() if role is not Role.PREFILL and name not in self.stopping]
        workers = []
        for name, role in self.roles.items():
            share = running // len(decodes) if name in decodes else 0
            age_s = self.now - self.since[name]
            is_cold = age_s < self.settings.warm_s and self.cold_step_s is not None
            workers.append(
                WorkerSample(
                    worker_id=name,
                    role=role,
                    age_s=age_s,
                    queued_tokens=self.queued / len(prefills) if name in prefills else 0.0,
                    prefill_tokens_per_s=TOKENS_PER_S / (50 if is_cold else 1),
                    running=share,
                    step_s=self.cold_step_s if is_cold else STEP_S * share if share else None,
                    kv_used=min(1.0, share / 100),
                    draining=name in self.stopping,
                )
            )
        return FleetSample(workers=workers, arrived_tokens_per_s=tokens_per_s, ttft_s=ttft_s)

    def do(self, action: Action, sample: FleetSample) -> None:
        if isinstance(action, Keep):
            return
        self.actions.append((self.now, action))
        self.scaler.carried_out(action, sample, self.now)
        match action:
            case Flip(worker_id=name, role=role):
                assert self.roles[name] is not role
                self.roles[name] = role  # its process goes on, so it stays warm
            case Start(role=role):
                if self.can_start:
                    self.starting.append((self.now + self.start_takes_s, role))
            case Stop(worker_id=name):
                self.stopping[name] = self.now + 3.0

    @property
    def kinds(self) -> list[str]:
        return [type(action).__name__ for _, action in self.actions]


def fleet(num_prefill: int, num_decode: int, **more: object) -> Model:
    roles = {WorkerId(f"p{i}"): Role.PREFILL for i in range(num_prefill)}
    roles |= {WorkerId(f"d{i}"): Role.DECODE for i in range(num_decode)}
    return Model(roles, **more)  # type: ignore[arg-type]


FIXED = replace(SETTINGS, max_workers=0)  # only roles change


def test_roles_follow_traffic_that_turns_from_input_to_output() -> None:
    model = fleet(4, 4, settings=FIXED)
    model.run(200, tokens_per_s=55_000, running=40)
    assert (model.count(Role.PREFILL), model.count(Role.DECODE)) == (6, 2)
    model.run(400, tokens_per_s=5_000, running=240)
    assert (model.count(Role.PREFILL), model.count(Role.DECODE)) == (2, 6)
    assert set(model.kinds) == {"Flip"}


def test_workers_start_and_stop_with_the_load() -> None:
    model = fleet(1, 1, settings=replace(SETTINGS, max_workers=6))
    model.run(300, tokens_per_s=30_000, running=40)
    assert model.count(Role.PREFILL) >= 4
    model.run(1200, tokens_per_s=100, running=2)
    assert (model.count(Role.PREFILL), model.count(Role.DECODE)) == (1, 1)


def test_a_fleet_of_unified_workers_grows_with_unified_workers() -> None:
    model = Model({WorkerId("u"): Role.UNIFIED})
    model.run(120, tokens_per_s=15_000, running=10)
    assert model.count(Role.UNIFIED) == len(model.roles) > 1


# ---- known failures of other autoscalers


def test_traffic_that_falls_to_zero() -> None:
    """No measurement is a number then, and the fleet shrinks to its fewest workers, one at a time."""
    model = fleet(3, 4)
    model.run(60, tokens_per_s=15_000, running=60)
    nan = float("nan")
    sample = replace(model.sample(0.0, 0), ttft_s=nan, itl_s=nan)
    assert math.isfinite(model.scaler.decide(sample, model.now).numbers["decode_load"])
    model.run(2000, tokens_per_s=0.0, running=0)
    assert (model.count(Role.PREFILL), model.count(Role.DECODE)) == (1, 1)
    assert set(model.kinds) == {"Stop"}
    model.run(100, tokens_per_s=15_000, running=20)
    assert model.count(Role.PREFILL) > 1, "it grows again"


@pytest.mark.parametrize("tokens_per_s", [7_000, 8_000, 8_600, 9_500, 12_000])
def test_no_oscillation_at_a_steady_load(tokens_per_s: float) -> None:
    """Two workers have little to do, and one has too much: the fleet must not go back and forth between the two."""
    model = fleet(2, 1)
    noise = random.Random(7)
    for _ in range(300):
        model.run(10, tokens_per_s * noise.uniform(0.9, 1.1), running=20)
    assert len(model.actions) <= 2, model.actions


def test_no_oscillation_between_two_roles() -> None:
    """Both pools need the same worker."""
    model = fleet(1, 2, settings=FIXED)
    model.run(1000, tokens_per_s=9_500, running=98)
    assert len(model.actions) <= 1, model.actions


def test_a_scale_up_that_cannot_be_met() -> None:
    """There is no GPU left. Requests for a worker become rare, and roles still follow the load."""
    model = fleet(1, 3, can_start=False, settings=replace(SETTINGS, start_s=30.0))
    model.run(1000, tokens_per_s=30_000, running=90)
    starts = [when for when, action in model.actions if isinstance(action, Start)]
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert gaps == sorted(gaps)
    assert len(starts) <= 6
    before = len(model.actions)
    model.run(200, tokens_per_s=30_000, running=6)
    assert any(isinstance(action, Flip) for _, action in model.actions[before:])
    model.can_start = True
    model.run(1200, tokens_per_s=60_000, running=6)
    assert model.starting or len(model.roles) > 4, "it asks again"


def test_a_rebalance_stays_within_the_budget() -> None:
    """A pool must not grow before the other one has given its worker back: both would not fit."""
    model = fleet(4, 4, settings=replace(SETTINGS, max_workers=8), start_takes_s=20.0)
    rng = random.Random(3)
    for _ in range(60):
        model.run(30, tokens_per_s=rng.choice([0, 2_000, 60_000]), running=rng.choice([0, 30, 300]))
    assert max(model.sizes) <= 8
    assert {"Flip", "Stop", "Start"} <= set(model.kinds)


def test_samples_of_a_cold_worker_do_not_count() -> None:
    """A new worker compiles kernels and fills its cache, so its first steps are slow. That is no reason for another one."""
    model = fleet(1, 1, cold_step_s=3.0)
    model.run(100, tokens_per_s=12_000, running=20)
    assert model.kinds == ["Start"]
    assert model.count(Role.PREFILL) == 2


# ---- rules


def test_a_change_needs_several_decisions_that_agree() -> None:
    model = fleet(1, 3, settings=FIXED)
    for _ in range(20):  # a burst that is over before it is confirmed
        model.run(2, tokens_per_s=50_000, running=10)
        model.queued = 0.0
        model.run(5, tokens_per_s=0, running=10)
        model.queued = 0.0
    assert model.actions == []


@pytest.mark.parametrize(
    "turn", [lambda m: m.run(500, 90_000, 10), lambda m: m.run(500, 0, 600)], ids=["input", "output"]
)
def test_each_pool_keeps_its_fewest_workers(turn: Callable[[Model], None]) -> None:
    model = fleet(3, 3, settings=replace(FIXED, min_prefill=2, min_decode=2))
    turn(model)
    assert min(model.count(Role.PREFILL), model.count(Role.DECODE)) == 2


def test_the_worker_with_the_fewest_requests_changes() -> None:
    scaler = Autoscaler(replace(FIXED, confirm=1))
    workers = [
        WorkerSample(worker_id=WorkerId("p"), role=Role.PREFILL, age_s=99, queued_tokens=9e5, prefill_tokens_per_s=1e4),
        *(
            WorkerSample(worker_id=WorkerId(f"d{n}"), role=Role.DECODE, age_s=99, running=n, step_s=0.01)
            for n in (5, 2, 7)
        ),
    ]
    decision = scaler.decide(FleetSample(workers=workers), 0.0)
    assert decision.action == Flip(WorkerId("d2"), Role.PREFILL)
    assert decision.numbers["prefill_load"] == 45.0
    assert "prefill 45.00" in decision.reason


def flip_times(model: Model) -> list[float]:
    return [when for when, action in model.actions if isinstance(action, Flip)]


def test_a_large_overload_moves_several_workers_without_a_pause() -> None:
    """A pool at most doubles, then the pause and the confirmation apply again."""
    model = fleet(2, 8, settings=FIXED)
    model.run(60, tokens_per_s=200_000, running=8)
    gaps = [later - earlier for earlier, later in pairwise(flip_times(model))]
    pause_s = FIXED.hold_s + FIXED.confirm - 1
    assert gaps == [1.0, pause_s, 1.0, 1.0, 1.0, pause_s]
    assert (model.count(Role.PREFILL), model.count(Role.DECODE)) == (9, 1)


def test_a_small_overload_moves_one_worker() -> None:
    model = fleet(4, 4, settings=FIXED)
    model.run(int(FIXED.hold_s), tokens_per_s=36_000, running=8)
    assert len(model.actions) == 1


def test_the_move_of_several_workers_ends_with_the_overload() -> None:
    model = fleet(4, 8, settings=FIXED)
    model.run(3, tokens_per_s=100_000, running=8)
    assert len(model.actions) == 1
    model.queued = 0.0
    model.run(1, tokens_per_s=1_000, running=8)
    model.run(5, tokens_per_s=100_000, running=8)
    assert len(model.actions) == 1, "a plan that was given up does not go on"


def test_the_move_of_several_workers_leaves_the_other_pool_its_room() -> None:
    """Four workers decode at a load of 0.5. Two of them would have a load of 1."""
    model = fleet(4, 4, settings=FIXED)
    model.run(200, tokens_per_s=200_000, running=100)
    assert model.count(Role.DECODE) == 3
    assert max(model.sample(0.0, 100).workers, key=lambda one: one.running).running * STEP_S < FIXED.itl_s


def test_the_move_of_several_workers_goes_on_after_a_refused_one() -> None:
    model = fleet(4, 8, settings=FIXED)
    model.run(3, tokens_per_s=100_000, running=8)
    sample = model.sample(100_000, 8)
    refused = [model.scaler.decide(sample, model.now + tries).action for tries in (1, 2)]
    assert [type(one) for one in refused] == [Flip, Flip]
    model.now += 2
    model.run(20, tokens_per_s=100_000, running=8)
    assert [later - earlier for earlier, later in pairwise(flip_times(model)[:4])] == [3.0, 1.0, 1.0]


@pytest.mark.parametrize("seed", range(10))
def test_no_oscillation_under_bursts(seed: int) -> None:
    """Opposite flips are at least `reverse_s` apart, however large the bursts are."""
    rng = random.Random(seed)
    model = fleet(4, 4, settings=FIXED)
    for _ in range(100):
        model.run(rng.randint(1, 40), rng.choice([0, 3e4, 1e6]), rng.choice([0, 80, 2000]))
    for (before_s, before), (now_s, now) in pairwise(model.actions):
        assert isinstance(before, Flip)
        assert isinstance(now, Flip)
        assert before.role is now.role or now_s - before_s >= FIXED.reverse_s


def test_a_decode_pool_that_still_grows_keeps_its_workers() -> None:
    """The running sequences will need all four workers. Prefill misses its goal meanwhile, and must not get one of them."""
    model = fleet(4, 4, settings=FIXED)
    for running in range(16, 160, 4):
        model.run(1, tokens_per_s=20_000 if running < 80 else 36_000, running=running)
    assert model.actions == []
    model.run(int(FIXED.reverse_s), tokens_per_s=36_000, running=40)
    assert [action.role for _, action in model.actions if isinstance(action, Flip)] == [Role.PREFILL]


def test_prefill_gives_a_worker_to_a_decode_pool_in_overload() -> None:
    """Neither pool has room, and decode is far above its goal: a worker moves while the higher load of the two falls."""
    model = fleet(4, 4, settings=FIXED)
    model.run(200, tokens_per_s=32_000, running=600)
    assert (model.count(Role.PREFILL), model.count(Role.DECODE)) == (2, 6)


def test_an_overloaded_decode_pool_leaves_prefill_what_it_needs_as_much() -> None:
    """Decode is a little above its goal. Without a worker, prefill would be above its own as far."""
    model = fleet(4, 4, settings=FIXED)
    model.run(200, tokens_per_s=32_000, running=220)
    assert model.actions == []


def test_no_workers_is_no_error() -> None:
    decision = Autoscaler(SETTINGS).decide(FleetSample(workers=[], waiting_tokens=1e6), 0.0)
    assert isinstance(decision.action, Keep)


@pytest.mark.parametrize(
    "wrong",
    [
        {"low": 1.0},
        {"max_workers": 2, "min_workers": 3},
        {"max_workers": 2, "min_prefill": 3},
        {"max_workers": 2, "min_decode": 3},
        {"mode": "maybe"},
        {"ttft_s": 0},
        {"ttft_s": math.nan},
        {"confirm": 0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="autoscale"):
        AutoscaleSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_any_traffic_keeps_the_bounds(seed: int) -> None:
    rng = random.Random(seed)
    settings = replace(
        SETTINGS, max_workers=rng.randint(4, 10), hold_s=rng.choice([0.0, 10.0]), warm_s=rng.choice([0, 5])
    )
    model = fleet(2, 2, settings=settings, can_start=rng.random() < 0.7)
    for _ in range(40):
        ttft_s = rng.choice([None, 0.1, 50.0])
        model.run(rng.randint(1, 40), rng.choice([0, 1e3, 2e4, 1e6]), rng.choice([0, 5, 80, 2000]), ttft_s)
        assert min(model.count(Role.PREFILL), model.count(Role.DECODE)) >= 1
    assert max(model.sizes) <= settings.max_workers
