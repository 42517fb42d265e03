"""Limits and budgets that gateways share through the store: never more than the limit in all, and at most one lease lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.base.errors import Overloaded
from stoker.gateway.admission.admission import Admission, AdmittedRequest
from stoker.gateway.admission.admission_settings import AdmissionSettings
from stoker.gateway.admission.api_keys import ApiKeys, Caller
from stoker.gateway.admission.budgets import UNITS, spent_names
from stoker.gateway.admission.fair_queue import Capacity
from stoker.gateway.admission.leased_limits import LimitLease, divide
from stoker.gateway.admission.limit_leases import LimitLeases
from stoker.gateway.admission.prices import Price
from stoker.gateway.admission.rate_limits import Bucket, OpenRequests
from stoker.gateway.key_settings import KeySettings
from stoker.gateway.store.limit_tables import add_spent
from stoker.gateway.store.sqlite import SqliteStore
from stoker.gateway.store.store_threads import StoreThreads

PRICE = Price(UNITS // 1000, UNITS // 10_000, UNITS // 1000)  # a thousandth for a token


class SharedClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class OneGateway:
    """The admission of one gateway, with a key of the given limits."""

    def __init__(self, store: SqliteStore, clock: SharedClock, name: str, key: KeySettings) -> None:
        self.threads = StoreThreads(store)
        self.leases = LimitLeases(self.threads, name, clock, clock)
        price = lambda model: PRICE  # noqa: E731
        self.admission = Admission(
            AdmissionSettings(), lambda lane, now: Capacity(), clock=clock, leases=self.leases, price=price
        )
        self.keys = ApiKeys([key])
        self.caller: Caller = self.keys._by_digest[bytes.fromhex(key.sha256)][1]

    async def ask(self, tokens: int = 10, session: str | None = None) -> AdmittedRequest:
        await self.admission.prepare(self.caller)
        claim = self.admission.claim(self.caller)
        try:
            await self.admission.charge_session(claim, session)
            await self.admission.enter(claim, tokens, lane="m")
        except Overloaded:
            claim.done()
            raise
        return claim

    async def count(self, asked: int) -> int:
        """Return how many of the requests are admitted; all end at once, without output."""
        admitted = 0
        for _ in range(asked):
            try:
                (await self.ask()).done(10, 0)
            except Overloaded:
                continue
            admitted += 1
        return admitted


async def renew(*gateways: OneGateway) -> None:
    """Renew the leases, which the gateways do once in a second."""
    for gateway in gateways:
        await gateway.leases._renewal()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db")
    yield store
    store.close()


def key_with(**limits: object) -> KeySettings:
    return KeySettings("alice", "a" * 64, tenant="red", **limits)  # type: ignore[arg-type]


def test_the_parts_of_a_limit_never_exceed_it() -> None:
    """Random gateways ask, are killed and come back; seed 5."""
    rng = random.Random(5)
    for total, is_whole in ((100.0, False), (7, True), (1, True)):
        limit = OpenRequests(total) if is_whole else Bucket(total)
        leases: dict[str, LimitLease] = {}
        for step in range(500):
            now_s, name = float(step), f"g{rng.randrange(4)}"
            part = divide(limit, 0.0, rng.choice([0.0, 1.0, total]), list(leases.values()), name, now_s)
            assert part.amount >= 0
            leases[name] = LimitLease(name, part.amount, 1.0, 0.0, now_s, now_s + 10)
            live = [one for one in leases.values() if one.expires_s > now_s]
            assert sum(one.amount for one in live) <= total + 1e-9


def test_one_gateway_has_the_whole_limit_and_two_share_it(store: SqliteStore) -> None:
    async def main() -> None:
        clock, key = SharedClock(), key_with(requests_per_minute=60)
        first, second = (OneGateway(store, clock, name, key) for name in ("g1", "g2"))
        assert await first.count(100) == 60  # as without leases
        clock.now += 30
        taken = [0, 0]
        for step in range(240):  # a minute of requests at both, four per second and gateway
            clock.now += 0.25
            if step % 4 == 0:
                await renew(first, second)
            for index, gateway in enumerate((first, second)):
                taken[index] += await gateway.count(1)
        assert 70 <= sum(taken) <= 92  # 30 had been refilled, and 60 more in the minute; dividing costs some
        assert min(taken) >= 15
        for gateway in (first, second):
            await gateway.leases.close()
            gateway.threads.close()

    asyncio.run(main())


def test_a_killed_gateway_gives_its_successor_no_new_minute(store: SqliteStore) -> None:
    async def main() -> None:
        clock, key = SharedClock(), key_with(requests_per_minute=60)
        admitted = 0
        for number in range(10):  # each is killed: its lease is not given back
            gateway = OneGateway(store, clock, f"g{number}", key)
            admitted += await gateway.count(40)
            await asyncio.gather(gateway.leases._renewal())  # the last report before the end
            clock.now += 12  # the lease ends after 10 s
            gateway.leases._task.cancel()
            gateway.threads.close()
        assert 60 <= admitted <= 60 + 9 * 12 + 1

    asyncio.run(main())


def test_open_requests_are_counted_over_all_gateways(store: SqliteStore) -> None:
    async def main() -> None:
        clock, key = SharedClock(), key_with(concurrency=4)
        gateways = [OneGateway(store, clock, name, key) for name in ("g1", "g2")]
        claims = [await gateways[0].ask() for _ in range(4)]
        for gateway in gateways:
            with pytest.raises(Overloaded, match="its limit is 4"):
                await gateway.ask()
        claims.pop().done(10, 0)
        claims.pop().done(10, 0)
        at_second = []
        for _ in range(8):  # both ask once in a second; the second gateway finds what the first has given back
            clock.now += 1
            await renew(*gateways)
            for gateway, mine in zip(gateways, (claims, at_second), strict=True):
                try:
                    mine.append(await gateway.ask())
                except Overloaded:
                    continue
            assert len(claims) + len(at_second) <= 4
        assert len(claims) + len(at_second) == 4
        assert at_second
        for gateway in gateways:
            await gateway.leases.close()
            gateway.threads.close()

    asyncio.run(main())


def spend(store: SqliteStore, key: KeySettings, units: int, session: str | None, now_s: float) -> None:
    """Count a request's cost, as the meter does."""
    with store.transaction() as changes:
        add_spent(changes, dict.fromkeys(spent_names(key, session, now_s), units), now_s)


@pytest.mark.parametrize("period", ["total", "day"])
def test_a_budget_holds_over_gateways_and_restarts(store: SqliteStore, period: str) -> None:
    async def main() -> None:
        clock, key = SharedClock(), key_with(budget=1.0, budget_period=period)
        gateways = [OneGateway(store, clock, name, key) for name in ("g1", "g2")]
        spent, codes = 0, set()
        for step in range(60):
            gateway = gateways[step % 2]
            clock.now += 0.5
            if step % 2:
                await renew(*gateways)
            try:
                claim = await gateway.ask(20)
            except Overloaded as error:
                codes.add(error.code)
                continue
            claim.done(20, 30)
            spent += 50
            spend(store, key, 50 * PRICE.input, None, clock.now)
        assert codes == {"insufficient_quota"}
        assert 850 <= spent <= 1050  # thousandths; at most one request above
        late = OneGateway(store, clock, "g3", key)
        with pytest.raises(Overloaded, match="budget of this key, 1"):
            await late.ask(200)
        clock.now += 86_400
        if period == "day":
            (await gateways[0].ask(20)).done(20, 0)
        else:
            with pytest.raises(Overloaded):
                await gateways[0].ask(200)
        for gateway in (*gateways, late):
            await gateway.leases.close()
            gateway.threads.close()

    asyncio.run(main())


def test_each_session_has_its_budget(store: SqliteStore) -> None:
    async def main() -> None:
        clock, key = SharedClock(), key_with(session_budget=0.1)
        gateway = OneGateway(store, clock, "g1", key)
        for session in ("s1", "s2"):
            (await gateway.ask(60, session)).done(60, 0)
            spend(store, key, 60 * PRICE.input, session, clock.now)
            with pytest.raises(Overloaded, match=r"budget of this session, 0\.1"):
                await gateway.ask(60, session)
        (await gateway.ask(60)).done(60, 0)  # without a session there is no such budget
        await gateway.leases.close()
        gateway.threads.close()

    asyncio.run(main())


def test_a_request_above_its_budget_uses_no_tokens(store: SqliteStore) -> None:
    async def main() -> None:
        gateway = OneGateway(store, SharedClock(), "g1", key_with(tokens_per_minute=1000, budget=0.1))
        for _ in range(5):
            with pytest.raises(Overloaded, match="budget of this key"):
                await gateway.ask(900)
        (await gateway.ask(90)).done(90, 0)
        await gateway.leases.close()
        gateway.threads.close()

    asyncio.run(main())


def test_without_the_store_limits_hold_here_and_budgets_allow_nothing(store: SqliteStore) -> None:
    async def main() -> None:
        clock = SharedClock()
        limited = OneGateway(store, clock, "g1", key_with(requests_per_minute=5))
        paid = OneGateway(store, clock, "g1", key_with(budget=1.0))
        for gateway in (limited, paid):
            gateway.threads.close()  # every transaction fails from now on

            async def fails(*args: object) -> None:
                raise Overloaded("no store")

            gateway.threads.write = fails  # type: ignore[assignment]
        assert await limited.count(10) == 5
        assert await paid.count(3) == 0

    asyncio.run(main())
