"""The threads for long bodies: tenants take turns, and a cancelled job that did not begin never runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from waiting import LONG_S, until

from stoker.gateway.prefix.fair_threads import FairThreads


class Jobs:
    """Jobs that run until `gate` opens. `order` has the names in the order in which they began."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.order: list[str] = []

    def job(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.order.append(name)
            assert self.gate.wait(LONG_S)
            return name

        return work


def test_a_tenants_long_jobs_leave_a_thread_for_another_tenant() -> None:
    async def main() -> None:
        threads, jobs = FairThreads(num_threads=2, per_tenant=1), Jobs()
        many = [asyncio.create_task(threads.run("red", 100, jobs.job(f"red{n}"))) for n in range(5)]
        await until(lambda: jobs.order == ["red0"])
        one = asyncio.create_task(threads.run("blue", 1, jobs.job("blue")))
        await until(lambda: jobs.order == ["red0", "blue"])
        jobs.gate.set()
        assert await one == "blue"
        assert await asyncio.gather(*many) == [f"red{n}" for n in range(5)]
        threads.close()

    asyncio.run(main())


def test_tenants_take_turns_by_the_size_of_their_jobs() -> None:
    async def main() -> None:
        threads, jobs = FairThreads(num_threads=1, per_tenant=1), Jobs()
        tasks = [asyncio.create_task(threads.run("red", 10, jobs.job(f"red{n}"))) for n in range(3)]
        await until(lambda: jobs.order == ["red0"])
        tasks += [asyncio.create_task(threads.run("blue", 4, jobs.job(f"blue{n}"))) for n in range(4)]
        await asyncio.sleep(0)
        jobs.gate.set()
        await asyncio.gather(*tasks)
        assert jobs.order == ["red0", "blue0", "blue1", "blue2", "red1", "blue3", "red2"]
        threads.close()

    asyncio.run(main())


def test_a_cancelled_job_that_has_not_begun_never_runs() -> None:
    async def main() -> None:
        threads, jobs = FairThreads(num_threads=1, max_waiting=1), Jobs()
        first = asyncio.create_task(threads.run("red", 1, jobs.job("first")))
        await until(lambda: jobs.order == ["first"])
        assert threads.has_room("red")
        second = asyncio.create_task(threads.run("red", 1, jobs.job("second")))
        await asyncio.sleep(0)
        assert not threads.has_room("red")
        assert threads.has_room("blue")
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert threads.has_room("red")
        jobs.gate.set()
        assert await first == "first"
        assert jobs.order == ["first"]
        threads.close()

    asyncio.run(main())


def test_an_error_reaches_the_caller_and_the_thread_is_free_again() -> None:
    async def main() -> None:
        threads = FairThreads(num_threads=1)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await threads.run("red", 1, lambda: 1 // 0)
        assert await threads.run("red", 1, lambda: 7) == 7
        threads.close()

    asyncio.run(main())
