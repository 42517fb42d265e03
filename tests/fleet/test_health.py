from __future__ import annotations

import pytest

from stoker.base.errors import ConfigError
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet, FleetSettings
from stoker.fleet.health import Breaker, HealthSettings, WorkerHealth
from stoker.fleet.spec import LoadReport, Role, WorkerSpec

SETTINGS = HealthSettings(
    failures_to_open=3, open_s=1.0, max_open_s=4.0, trial_s=10.0, busy_s=0.5, slow_start_s=10.0, slow_start_share=0.1
)
A, B = WorkerId("a"), WorkerId("b")


def spec(worker_id: WorkerId, role: Role = Role.UNIFIED, models: tuple[str, ...] = ("m",)) -> WorkerSpec:
    return WorkerSpec(worker_id=worker_id, url=f"http://{worker_id}", role=role, models=models)


def fleet(*worker_ids: WorkerId) -> Fleet:
    made = Fleet(FleetSettings(health=SETTINGS))
    for worker_id in worker_ids:
        made.add(spec(worker_id), 0.0)
    return made


def names(of: Fleet, now: float, model: str = "m") -> list[str]:
    return [member.worker_id for member in of.candidates(model, {Role.UNIFIED}, now)]


def test_a_new_worker_is_usable_until_a_probe_says_otherwise() -> None:
    health = WorkerHealth(SETTINGS, 0.0)
    assert health.usable(0.0)
    assert health.share(0.0) == 1.0
    health.saw_probe(live=True, ready=False, now=1.0)
    assert not health.usable(1.0)
    assert health.usable_at(1.0) is None


def test_consecutive_failures_open_the_breaker_and_a_success_resets_the_count() -> None:
    health = WorkerHealth(SETTINGS, 0.0)
    for kind in ("lost", "status5xx"):
        health.saw_failure(kind, 1.0)
    health.saw_success(1.0)
    for kind in ("timeout", "lost"):
        health.saw_failure(kind, 1.0)
    assert health.usable(1.0)
    health.saw_failure("lost", 1.0)
    assert not health.usable(1.0)
    assert health.usable_at(1.0) == 2.0


def test_a_refused_connection_opens_the_breaker_at_once() -> None:
    health = WorkerHealth(SETTINGS, 0.0)
    health.saw_failure("connect", 1.0)
    assert health.breaker(1.0) is Breaker.OPEN
    health.saw_probe(live=True, ready=True, now=1.2)
    assert health.breaker(1.2) is Breaker.HALF_OPEN, "it answers again, so it is tried without waiting"


def test_successful_probes_do_not_close_the_breaker() -> None:
    health = WorkerHealth(SETTINGS, 0.0)
    for _ in range(3):
        health.saw_failure("status5xx", 1.0)
    health.saw_probe(live=True, ready=True, now=1.2)
    assert not health.usable(1.2)


def test_a_failed_trial_doubles_the_backoff() -> None:
    health, now = WorkerHealth(SETTINGS, 0.0), 0.0
    health.saw_failure("connect", now)
    for wait_s in (1.0, 2.0, 4.0, 4.0):
        assert not health.usable(now + wait_s - 0.01)
        now += wait_s
        assert health.usable(now)
        health.begin_request(now)
        assert not health.usable(now), "one trial at a time"
        health.saw_failure("lost", now)
    health.begin_request(now + 4.0)
    health.saw_success(now + 4.1)
    assert health.breaker(now + 4.1) is Breaker.CLOSED
    assert health.share(now + 4.1) == pytest.approx(0.1)
    health.saw_failure("connect", now + 5.0)
    assert health.usable_at(now + 5.0) == now + 6.0, "a success resets the backoff"


def test_a_trial_passes_with_its_first_token_but_stays_on_probation_until_its_end() -> None:
    health, now = WorkerHealth(SETTINGS, 0.0), 0.0
    health.saw_failure("connect", now)
    for wait_s in (1.0, 2.0, 4.0):
        now += wait_s
        health.begin_request(now)
        assert health.saw_first_token(now)
        assert health.usable(now)
        assert health.share(now) == SETTINGS.slow_start_share
        health.saw_failure("lost", now)
        assert not health.usable(now), "a failure in the middle of the response counts as a failed trial"
    now += 4.0
    health.saw_first_token(now)
    health.saw_success(now)
    for _ in range(2):
        health.saw_failure("lost", now)
    assert health.usable(now), "a completed response clears the earlier failures"
    health.saw_failure("lost", now)
    assert health.usable_at(now) == now + SETTINGS.open_s


def test_first_tokens_do_not_reset_the_failure_count() -> None:
    health = WorkerHealth(SETTINGS, 0.0)
    for _ in range(3):
        assert not health.saw_first_token(1.0)
        health.saw_failure("lost", 1.0)
    assert not health.usable(1.0)


def test_a_trial_without_an_outcome_expires() -> None:
    health = WorkerHealth(SETTINGS, 0.0)
    health.saw_failure("connect", 0.0)
    health.begin_request(1.0)
    assert not health.usable(10.9)
    assert health.usable(11.0)


@pytest.mark.parametrize("live", [True, False], ids=["engine", "process"])
@pytest.mark.parametrize("kind", ["lost", "connect"])
def test_a_worker_that_probes_saw_come_back_needs_no_trial(kind: str, live: bool) -> None:
    """All streams of a single worker wait while its engine restarts. One trial at a time would delay them too long."""
    health = WorkerHealth(SETTINGS, 0.0)
    for _ in range(3):
        health.saw_failure(kind, 1.0)
    health.saw_probe(live=live, ready=False, now=1.1)
    assert not health.usable(5.0)
    health.saw_probe(live=True, ready=True, now=5.0)
    for _ in range(3):
        assert health.usable(5.0)
        assert not health.begin_request(5.0)
    assert health.share(5.0) == SETTINGS.slow_start_share
    health.saw_failure("lost", 6.0)
    assert health.usable_at(6.0) == 8.0, "on probation, one failure is enough"


def test_a_trial_that_still_runs_after_trial_s_has_passed_on_probation() -> None:
    health = WorkerHealth(SETTINGS, 0.0)
    for _ in range(3):
        health.saw_failure("lost", 0.0)
    assert health.begin_request(1.0)
    assert health.begin_request(11.0)
    assert health.breaker(11.0) is Breaker.CLOSED
    assert not health.begin_request(11.0), "there is no trial any more"
    health.saw_failure("lost", 12.0)
    assert health.usable_at(12.0) == 14.0, "as if the trial had failed"


def test_a_trial_does_not_pass_by_silence_after_timeouts() -> None:
    health = WorkerHealth(SETTINGS, 0.0)
    for _ in range(3):
        health.saw_failure("timeout", 0.0)
    for now in (1.0, 11.0, 21.0):
        assert health.usable(now)
        health.begin_request(now)
        assert not health.usable(now), "one trial at a time"


def test_a_worker_that_comes_back_starts_slowly() -> None:
    health = WorkerHealth(SETTINGS, 0.0)
    health.saw_probe(live=False, ready=False, now=1.0)
    health.saw_probe(live=True, ready=True, now=2.0)
    shares = [health.share(now) for now in (2.0, 7.0, 12.0)]
    assert shares == [pytest.approx(0.1), pytest.approx(0.55), 1.0]


def test_a_drained_worker_gets_no_requests_and_starts_slowly_afterwards() -> None:
    of = fleet(A, B)
    of.drain(A, 1.0)
    assert names(of, 1.0) == [B]
    of.drain(A, 2.0, on=False)
    assert names(of, 2.0) == [A, B]
    member = of.member(A)
    assert member is not None
    assert member.share == pytest.approx(0.1)


def test_busy_workers_are_avoided_while_others_are_free() -> None:
    of = fleet(A, B)
    of.saw_failure(A, 1.0, "busy")
    assert names(of, 1.0) == [B]
    of.saw_failure(B, 1.1, "busy")
    assert names(of, 1.2) == [A, B]
    assert names(of, 1.55) == [A]
    assert names(of, 1.7) == [A, B]


def test_a_free_prefill_worker_does_not_replace_busy_decode_workers() -> None:
    made = fleet()
    for worker_id, role in (("p1", Role.PREFILL), ("p2", Role.PREFILL), ("d1", Role.DECODE), ("d2", Role.DECODE)):
        made.add(spec(WorkerId(worker_id), role), 0.0)

    def found() -> list[str]:
        return [member.worker_id for member in made.pool("m", 1.0).members]

    made.saw_failure(WorkerId("d1"), 1.0, "busy")
    assert found() == ["p1", "p2", "d2"]
    made.saw_failure(WorkerId("d2"), 1.0, "busy")
    assert found() == ["p1", "p2", "d1", "d2"], "all decode workers are busy, so all of them are candidates"
    made.saw_failure(WorkerId("p1"), 1.0, "busy")
    assert found() == ["p2", "d1", "d2"]


def test_candidates_change_when_only_time_passes() -> None:
    of = fleet(A, B)
    of.saw_failure(A, 1.0, "connect")
    assert names(of, 1.0) == [B]
    assert names(of, 1.9) == [B]
    assert names(of, 2.0) == [A, B]
    member = of.member(A)
    assert member is not None
    of.begin_request(member, 2.0)
    assert names(of, 2.1) == [B]
    of.saw_success(A, 2.2)
    assert names(of, 2.3) == [A, B]
    assert member.share < 0.2
    assert names(of, 8.0) == [A, B]
    assert 0.5 < member.share < 0.7


def test_the_first_workers_skip_the_slow_start() -> None:
    of = fleet(A)
    late = of.add(spec(B), 100.0)
    names(of, 100.0)
    assert late.share == pytest.approx(0.1)
    first = of.member(A)
    assert first is not None
    assert first.share == 1.0


def test_heartbeats_do_not_make_later_workers_skip_the_slow_start() -> None:
    of = fleet(A)
    for beat in range(34):
        of.add(spec(A), 3.0 * beat)
    late = of.add(spec(B), 100.0)
    names(of, 100.0)
    assert late.share == pytest.approx(0.1)


def test_candidates_serve_the_model_and_have_the_role() -> None:
    of = Fleet()
    of.add(spec(A, Role.PREFILL), 0.0)
    of.add(spec(B, Role.UNIFIED, models=()), 0.0)
    assert names(of, 0.0) == []
    of.saw_models(B, ["m", "n"])
    assert names(of, 0.0) == [B]
    assert names(of, 0.0, "n") == [B]
    assert names(of, 0.0, "o") == []
    assert [m.worker_id for m in of.candidates("m", {Role.PREFILL, Role.UNIFIED}, 0.0)] == [A, B]
    assert set(of.models()) == {"m", "n"}


def test_unknown_model_names_are_not_cached() -> None:
    of = fleet(A)
    for number in range(100):
        names(of, 0.0, f"made-up-{number}")
    assert len(of._pools) == 0


def test_silent_registered_workers_expire_and_configured_ones_do_not() -> None:
    of = fleet(A)
    guest = WorkerSpec(worker_id=B, url="", models=("m",), from_config=False)
    of.add(guest, 0.0)
    of.add(guest, 20.0)
    assert of.expire(40.0, silent_s=30.0) == []
    assert of.expire(51.0, silent_s=30.0) == [B]
    assert names(of, 51.0) == [A]


def test_unmeasured_workers_get_the_average_rate() -> None:
    of = Fleet(FleetSettings(prefill_tokens_per_s=1000.0))
    first, second = of.add(spec(A), 0.0), of.add(spec(B), 0.0)
    assert of.prefill_rate(first) == 1000.0
    of.saw_prefill(A, 5000, 2.0)
    assert of.prefill_rate(first) == of.prefill_rate(second) == 2500.0
    of.saw_report(B, LoadReport(prefill_tokens_per_s=9000.0, step_s=0.01), 1.0)
    of.saw_prefill(B, 10, 2.0)
    assert of.prefill_rate(second) == 9000.0, "a reported rate takes precedence over a measured one"
    assert of.step_s(first) == of.step_s(second) == 0.01


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("wrong", [NAN, INF, -INF, -5.0, 1e300])
def test_speeds_that_no_worker_can_have_are_ignored(wrong: float) -> None:
    of = Fleet(FleetSettings(prefill_tokens_per_s=1000.0, step_s=0.02))
    first, second = of.add(spec(A), 0.0), of.add(spec(B), 0.0)
    of.saw_report(A, LoadReport(prefill_tokens_per_s=wrong, step_s=wrong, kv_used=wrong), 1.0)
    assert (of.prefill_rate(first), of.step_s(first)) == (1000.0, 0.02)
    assert (of.prefill_rate(second), of.step_s(second)) == (1000.0, 0.02)
    assert 0.0 <= first.kv_used <= 1.0
    of.saw_report(A, LoadReport(prefill_tokens_per_s=2000.0, step_s=0.01), 2.0)
    of.saw_report(A, LoadReport(prefill_tokens_per_s=wrong, step_s=wrong), 3.0)
    assert (of.prefill_rate(first), of.step_s(first)) == (2000.0, 0.01), "the last ones that are possible stay"


def test_counts_that_no_worker_can_have_are_bounded() -> None:
    of = fleet(A)
    of.saw_report(A, LoadReport(-1, -(10**30), 10**30, num_blocks=-7, block_tokens=10**30), 1.0)
    report = of.members()[0].report
    assert report == LoadReport(0, 0, 1 << 40, num_blocks=0, block_tokens=1 << 40)


def test_a_weight_of_zero_is_rejected() -> None:
    with pytest.raises(ConfigError, match="weight=0"):
        WorkerSpec(worker_id=A, url="", weight=0)
