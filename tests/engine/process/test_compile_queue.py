"""Grammars of one tenant never delay those of another: the fair queue, its threads, and real grammars."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.engine.process.grammars.compile_queue import CompileJob, FairCompilers, FairSlots
from stoker.engine.process.grammars.lazy_grammars import LazyGrammars
from stoker.engine.process.mailbox import GrammarCompiled, Mailbox
from stoker.sched.request import GrammarSpec

LONG_S = 60.0
SEED = random.SystemRandom().randrange(1 << 32)


class SilentPipe:
    def receive(self) -> object:
        threading.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("num_slots", [2, 3, 4, 8])
def test_one_tenant_never_has_all_slots(num_slots: int) -> None:
    slots: FairSlots[int] = FairSlots(num_slots)
    for job in range(100):
        slots.put("greedy", job)
    while slots.take() is not None:
        pass
    slots.put("other", -1)
    assert slots.take() == ("other", -1)
    slots.done("greedy")
    slots.done("other")
    assert slots.take() == ("greedy", num_slots - 1)


def test_a_single_slot_is_given_in_turns() -> None:
    slots: FairSlots[int] = FairSlots(1)
    for tenant, jobs in (("a", 3), ("b", 2), ("c", 1)):
        for job in range(jobs):
            slots.put(tenant, job)
    served = []
    while (taken := slots.take()) is not None:
        served.append(taken)
        slots.done(taken[0])
    assert served == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2)]


def test_a_new_tenant_waits_for_at_most_one_job_of_the_others() -> None:
    """In any schedule of tenants that always have more jobs, a tenant with none running gets the next free slot."""
    print("seed", SEED)
    rng = random.Random(SEED)
    for _ in range(200):
        slots: FairSlots[int] = FairSlots(rng.randint(1, 6))
        running: list[str] = []
        waited: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for _ in range(100):
            tenant = rng.choice("abcdefgh")
            slots.put(tenant, 0)
            waiting[tenant] += 1
            if running and rng.random() < 0.7:
                slots.done(running.pop(rng.randrange(len(running))))
            while (taken := slots.take()) is not None:
                waiting[taken[0]] -= 1
                idle = [one for one in waiting if waiting[one] and one not in running]
                assert taken[0] not in running or not idle
                running.append(taken[0])
                waited[taken[0]] += 1


def test_a_job_that_two_tenants_wait_for_runs_once_and_at_the_earlier_turn() -> None:
    held, done = threading.Event(), threading.Event()
    runs: list[str] = []
    compilers = FairCompilers(2, lambda: None)

    def call(name: str, then: Callable[[], object] = lambda: None) -> CompileJob:
        return CompileJob(lambda _: (runs.append(name), then())[0])

    try:
        compilers.submit("greedy", call("slow", lambda: held.wait(LONG_S)))
        common = call("common", done.set)
        compilers.submit("greedy", common)
        compilers.submit("other", common)
        assert done.wait(LONG_S)
        assert common.result(LONG_S) is None
    finally:
        held.set()
    last = call("last")
    compilers.submit("greedy", last)
    last.result(LONG_S)
    assert runs == ["slow", "common", "last"]


def test_a_cancelled_job_does_not_run_and_returns_its_slot() -> None:
    compilers = FairCompilers(1, lambda: None)
    held = threading.Event()
    first, second, third = (
        CompileJob(lambda _: held.wait(LONG_S) and None),
        CompileJob(pytest.fail),
        CompileJob(lambda _: None),
    )
    for job in (first, second, third):
        compilers.submit("a", job)
    assert second.cancel()
    held.set()
    third.result(LONG_S)


def test_slow_grammars_of_a_tenant_do_not_delay_another_tenants_schema(smollm2: Path) -> None:
    """Each of the first tenant's schemas takes a good part of a second, more than a busy machine needs for a small one."""
    mailbox = Mailbox(SilentPipe(), LazyGrammars(smollm2, 49152))  # type: ignore[arg-type]
    num_slow = 12
    for number in range(num_slow):
        values = [f"value {number} {value}" for value in range(2000)]
        mailbox.compile(GrammarSpec("json_schema", json.dumps({"enum": values})), "tenant:slow")
    ordinary = GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    mailbox.compile(ordinary, "tenant:other")
    compiled: list[GrammarSpec] = []
    while ordinary not in compiled:
        for message in mailbox.take(wait=True, timeout_s=LONG_S):
            assert isinstance(message, GrammarCompiled)
            assert message.error is None
            compiled.append(message.spec)
    assert compiled.index(ordinary) <= num_slow // 2  # in the order of arrival it would be the last
