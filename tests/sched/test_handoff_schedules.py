"""Any path through prefill, hand-off, tiers and failures gives the same answer, and returns every block to the pool.

Two schedulers, each with a fake device, share a store of blocks. Everything else is random: loads finish late, partly or not
at all; leases are released or expire; sequences are cancelled at any time.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from fake_device import VOCAB, FakeDevice, lone_run, random_pools, random_reaches, random_request

from stoker.base.errors import InvalidRequest
from stoker.base.ids import BlockKey, RequestId
from stoker.kv.blocks.keys import block_keys, root_key
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.reach import KvReach
from stoker.kv.blocks.transfer import KvLoad, KvTicket, LoadResult, LocalLoad
from stoker.sched.leases import LeasedKv, LeaseTerms
from stoker.sched.plan import StepResult
from stoker.sched.request import GenerateRequest, SamplingParams, TokenChunk
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig

LEASE_S = 40.0


@dataclass(eq=False)
class Worker:
    """A scheduler and its device, with a simple store and KV server."""

    rng: random.Random
    block_tokens: int
    num_blocks: int
    store: dict[tuple[int, BlockKey], list[int | None]]  # by KV set and key
    name: str
    reaches: list[KvReach] = field(default_factory=list)  # of the KV sets with a bounded reach
    launched: deque[StepResult] = field(default_factory=deque)
    loads: list[KvLoad] = field(default_factory=list)
    leases: dict[tuple[str, int], LeasedKv] = field(default_factory=dict)  # by lease and KV set
    answers: dict[str, list[int]] = field(default_factory=dict)
    finishes: dict[str, TokenChunk] = field(default_factory=dict)
    num_shortened: int = 0  # loads that brought a shorter prefix

    def __post_init__(self) -> None:
        max_rows = self.rng.choice([1, 2, 8])
        self.step_tokens = self.rng.choice([1, 3, 16, 128])
        config = SchedulerConfig(
            self.block_tokens,
            self.step_tokens,
            max_rows,
            "fake",
            LeaseTerms(self.name, "there", LEASE_S),
            max_offers=self.rng.choice([0, 1, 100]),
        )
        self.steps_ahead = self.rng.choice([0, 1, 2])
        self.pool = BlockPool(self.num_blocks)
        sizes = random.Random(f"local {self.name} {self.num_blocks}")
        self.local_pools = random_pools(sizes, self.reaches, self.block_tokens, self.num_blocks)
        self.scheduler = Scheduler(config, self.pool, None, self.local_pools)
        self.device = FakeDevice(self.num_blocks, self.block_tokens, max_rows, self.local_pools)

    def add(self, request: GenerateRequest) -> None:
        self.answers[request.request_id] = []
        keys = block_keys(request.token_ids, root_key("fake", request.cache_salt), self.block_tokens)
        num_stored = next((i for i, key in enumerate(keys) if (0, key) not in self.store), len(keys))
        self.scheduler.add(request, self.rng.choice([0, num_stored, num_stored]))

    def take(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            assert chunk.request_id not in self.finishes, "a chunk after the last one"
            self.answers[chunk.request_id] += chunk.token_ids
            if chunk.finish is not None:
                self.finishes[chunk.request_id] = chunk

    def step(self, now: float, peers: dict[str, Worker]) -> None:
        for load in [load for load in self.loads if self.rng.random() < 0.4]:
            self.loads.remove(load)
            self.scheduler.finish_load(self.load(load, peers))
        self.take(self.scheduler.expire(now))
        plan = self.scheduler.plan()
        if plan is not None:
            assert plan.spans or plan.loads
            assert plan.num_tokens <= self.step_tokens
            self.launched.append(self.device.run(plan))
            self.loads += plan.loads
        while self.launched and (plan is None or len(self.launched) > self.steps_ahead):
            self.take(self.scheduler.commit(self.launched.popleft()))
        self.take(self.scheduler.end_leaving())
        for offered in self.scheduler.take_offers():
            self.store[offered.kv_set, offered.name.key] = self.device.read(offered.block, offered.kv_set)
            self.scheduler.end_offers([offered])
        growing, broken = self.scheduler.take_leases()
        self.leases.update({(kv.lease_id, kv.kv_set): kv for kv in growing})
        for lease_id in [*broken, *self.scheduler.expired_leases(now)]:
            self.release(lease_id)
        for pool in (self.pool, *self.local_pools):
            pool.check()

    def release(self, lease_id: str) -> None:
        for kv_set in range(1 + len(self.local_pools)):
            self.leases.pop((lease_id, kv_set), None)
        self.scheduler.release_lease(lease_id)

    def load(self, load: KvLoad, peers: dict[str, Worker]) -> LoadResult:
        main = LocalLoad(0, load.first, load.keys, load.blocks)
        sources = [self.fetch(main, i, load.ticket, peers) for i in range(len(load.keys))]
        loaded = next((i for i, source in enumerate(sources) if source is None), len(sources))
        local = [self.fetch(part, i, load.ticket, peers) for part in load.local for i in range(len(part.keys))]
        if load.ticket is not None:
            peers[load.ticket.engine_id].release(load.ticket.lease_id)
        num_pulled = sources[:loaded].count("peer")
        if load.local and (None in local or loaded < len(load.keys)):
            loaded = next((count for count in range(loaded, 0, -1) if self.fetch_shorter(load, count)), 0)
            return LoadResult(load.load_id, loaded, min(num_pulled, loaded), loaded > 0)
        return LoadResult(load.load_id, loaded, num_pulled, None not in local)

    def fetch_shorter(self, load: KvLoad, count: int) -> bool:
        """Fill the first of the local blocks with what the token after the leading `count` blocks of a load sees."""
        end = load.first + count
        if count >= len(load.keys):
            return False
        for part in load.local:
            start = max(
                load.first, self.reaches[part.kv_set - 1].first_block(end * self.block_tokens, self.block_tokens)
            )
            keys = load.keys[start - load.first : count]
            if len(keys) > len(part.blocks):
                return False
            shorter = LocalLoad(part.kv_set, 0, keys, part.blocks)
            if not all(self.fetch(shorter, i, None, {}) for i in range(len(keys))):
                return False
        self.num_shortened += 1
        return True

    def fetch(self, part: LocalLoad, i: int, ticket: KvTicket | None, peers: dict[str, Worker]) -> str | None:
        block, kv_set = part.blocks[i], part.kv_set
        if self.rng.random() < 0.05:
            self.device.fill(block, [-7] * self.block_tokens, kv_set)  # a torn read
            return None
        if (stored := self.store.get((kv_set, part.keys[i]))) is not None:
            self.device.fill(block, stored, kv_set)
            return "store"
        if ticket is None:
            return None
        peer = peers[ticket.engine_id]
        kv = peer.leases.get((ticket.lease_id, kv_set))
        at = part.first + i
        if kv is None or at >= kv.num_ready:
            return None
        assert kv.keys[at] == part.keys[i], "both workers use the same key for a block"
        self.device.fill(block, peer.device.read(kv.blocks[at], kv_set), kv_set)
        return "peer"


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("seed", range(300))
def test_any_handoff_gives_the_tokens_of_a_single_worker(seed: int, local: bool) -> None:
    """`local`: the model also has KV sets with a bounded reach."""
    print("seed", seed)
    hand_over_at_random(seed, local)


def test_the_schedules_have_loads_that_bring_a_shorter_prefix() -> None:
    assert any(hand_over_at_random(seed, True) for seed in range(300))


def hand_over_at_random(seed: int, local: bool) -> int:
    """Check random schedules. Return how many loads brought a shorter prefix."""
    rng = random.Random(seed)
    block_tokens = rng.choice([1, 2, 4, 16])
    num_blocks = rng.choice([max(4, 16 // block_tokens), max(5, 64 // block_tokens), 400 // block_tokens])
    store: dict[tuple[int, BlockKey], list[int | None]] = {}
    reaches = random_reaches(random.Random(f"reaches {seed}")) if local else []
    prefill = Worker(rng, block_tokens, num_blocks, store, "P", reaches)
    decode = Worker(rng, block_tokens, num_blocks, store, "D", reaches)
    peers = {"P": prefill, "D": decode}
    shared = [rng.randrange(VOCAB) for _ in range(60)]
    # One block less than the pool has, because a lease may hold a block of another sequence for a while.
    kv_tokens = (num_blocks - 1) * block_tokens
    requests = {
        request.request_id: replace(request, deadline_s=None)
        for request in (random_request(rng, i, kv_tokens, shared) for i in range(rng.randint(1, 20)))
    }
    to_come = deque(requests.values())
    done: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    now = 0.0
    while to_come or prefill.scheduler.has_work or decode.scheduler.has_work:
        now += 1
        while to_come and rng.random() < 0.4:
            request = to_come.popleft()
            handed = rng.random() < 0.7
            if handed:
                prefill.add(replace(request, lease_id=f"lease-{request.request_id}"))
            else:
                decode.add(request)
        if rng.random() < 0.03:
            request_id = RequestId(rng.choice(list(requests)))
            for worker in peers.values():
                chunks = worker.scheduler.cancel(request_id)
                worker.take(chunks)
                cancelled.update(chunk.request_id for chunk in chunks)
        for worker in peers.values():
            worker.step(now, peers)
        for request_id, last in list(prefill.finishes.items()):
            if request_id in done or request_id in cancelled:
                continue
            done[request_id] = prefill.answers[request_id]
            assert last.finish is not None
            if last.finish.reason == "handoff":
                assert last.ticket is not None
                request = requests[request_id]
                # The gateway may have lost the ticket, or never have had one that is any good.
                ticket = rng.choice([last.ticket, last.ticket, last.ticket, None])
                decode.add(replace(request, token_ids=request.token_ids + done[request_id], ticket=ticket))
        assert now < 50_000, "no end in sight"

    now += 2 * LEASE_S
    for worker in peers.values():
        worker.step(now, peers)
        worker.step(now + 2 * LEASE_S, peers)
        assert all(pool.num_free == pool.num_blocks for pool in (worker.pool, *worker.local_pools)), worker.name
        assert worker.scheduler.num_held == 0
        assert worker.scheduler.num_loading == 0
        assert not worker.leases
    for request_id, request in requests.items():
        answer = done.get(request_id, []) + decode.answers.get(request_id, [])
        expected = lone_run(request)
        if request_id in cancelled:
            assert answer == expected[: len(answer)]
        else:
            assert answer == expected
    return prefill.num_shortened + decode.num_shortened


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_any_move_gives_the_tokens_of_a_single_worker(seed: int, local: bool) -> None:
    """Sequences move between two workers at any moment: while they wait, load, prefill or decode, any number of times."""
    print("seed", seed)
    rng = random.Random(f"move {seed}")
    block_tokens = rng.choice([1, 2, 4, 16])
    num_blocks = rng.choice([max(4, 16 // block_tokens), max(5, 64 // block_tokens), 400 // block_tokens])
    reaches = random_reaches(random.Random(f"reaches {seed}")) if local else []
    stores: list[dict[tuple[int, BlockKey], list[int | None]]] = [{}, {}]  # not shared, so that blocks must be pulled
    peers = {name: Worker(rng, block_tokens, num_blocks, stores[i], name, reaches) for i, name in enumerate("AB")}
    shared = [rng.randrange(VOCAB) for _ in range(60)]
    kv_tokens = (num_blocks - 1) * block_tokens
    requests = {
        request.request_id: replace(request, deadline_s=None)
        for request in (random_request(rng, i, kv_tokens, shared) for i in range(rng.randint(1, 12)))
    }
    place = {request_id: rng.choice("AB") for request_id in requests}
    tokens: dict[str, list[int]] = {request_id: [] for request_id in requests}
    to_come, now, num_moves = deque(requests.values()), 0.0, 0
    while to_come or any(worker.scheduler.has_work for worker in peers.values()):
        now += 1
        while to_come and rng.random() < 0.4:
            request = to_come.popleft()
            peers[place[request.request_id]].add(request)
        if rng.random() < 0.3 and num_moves < 40:
            request_id = RequestId(rng.choice(list(requests)))
            worker = peers[place[request_id]]
            worker.take(worker.scheduler.hand_off(request_id, f"move-{num_moves}"))
            num_moves += 1
        for worker in peers.values():
            worker.step(now, peers)
        for name, worker in peers.items():
            for request_id, last in list(worker.finishes.items()):
                if last.finish is not None and last.finish.reason == "handoff":
                    del worker.finishes[request_id]
                    tokens[request_id] += worker.answers.pop(request_id)
                    other = peers["B" if name == "A" else "A"]
                    place[request_id] = other.name
                    ticket = rng.choice([last.ticket, last.ticket, last.ticket, None])
                    request = requests[request_id]
                    moved = replace(request, token_ids=request.token_ids + tokens[request_id], ticket=ticket)
                    other.add(moved)
        assert now < 50_000, "no end in sight"

    for worker in peers.values():
        worker.step(now + 2 * LEASE_S, peers)
        worker.step(now + 4 * LEASE_S, peers)
        assert all(pool.num_free == pool.num_blocks for pool in (worker.pool, *worker.local_pools)), worker.name
        assert worker.scheduler.num_held == 0
    for request_id, request in requests.items():
        answer = tokens[request_id] + peers[place[request_id]].answers[request_id]
        assert answer == lone_run(request)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_moved_sequence_is_computed_once(num_steps: int) -> None:
    """Whether it has not begun, is in its prompt, or decodes."""
    source, target = a_worker(), a_worker()
    source.scheduler = Scheduler(SchedulerConfig(4, 8, 8, "fake", LeaseTerms("W", "there", LEASE_S)), source.pool)
    source.add(a_request(14))
    for _ in range(num_steps):
        source.step(0.0, {})
    source.take(source.scheduler.hand_off(RequestId("r"), "l"))
    source.step(0.0, {})
    last = source.finishes["r"]
    assert last.finish is not None
    assert last.finish.reason == "handoff"
    target.add(a_request(14, token_ids=[*range(14), *source.answers["r"]], ticket=last.ticket))
    while target.scheduler.has_work:
        target.step(0.0, {"W": source})
    assert source.answers["r"] + target.answers["r"] == lone_run(a_request(14))
    computed = source.scheduler.counters.computed_tokens + target.scheduler.counters.computed_tokens
    assert computed == 14 + 7  # the last of the 8 tokens needs no KV
    source.step(LEASE_S, {})
    assert source.pool.num_free == 32


def test_a_sequence_that_has_not_begun_takes_its_ticket_along() -> None:
    worker, ticket = a_worker(), KvTicket("other", "there", "l", 10, LEASE_S)
    worker.add(a_request(10, ticket=ticket))
    worker.take(worker.scheduler.hand_off(RequestId("r"), "unused"))
    assert worker.finishes["r"].ticket == ticket
    assert not worker.scheduler.has_work


def test_an_engine_without_a_kv_server_moves_a_sequence_without_its_kv() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 128, 8, "fake"), BlockPool(8))
    device = FakeDevice(8, 4, 8)
    scheduler.add(a_request(10))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(device.run(plan))
    (last,) = scheduler.hand_off(RequestId("r"), "l")
    assert last.finish is not None
    assert last.finish.reason == "handoff"
    assert last.ticket is None


def a_request(num_tokens: int, **fields: object) -> GenerateRequest:
    request = GenerateRequest(RequestId("r"), list(range(num_tokens)), num_tokens, SamplingParams(temperature=0.0), 8)
    return replace(request, **fields)  # type: ignore[arg-type]


class NoAccidents(random.Random):
    """Loads finish at once and completely."""

    def random(self) -> float:
        return 0.3


def a_worker(block_tokens: int = 4, num_blocks: int = 32, reaches: tuple[KvReach, ...] = ()) -> Worker:
    worker = Worker(NoAccidents(), block_tokens, num_blocks, {}, "W")
    worker.step_tokens = 128
    config = SchedulerConfig(block_tokens, worker.step_tokens, 8, "fake", LeaseTerms("W", "there", LEASE_S))
    worker.local_pools = [BlockPool(num_blocks, reach=reach) for reach in reaches]
    worker.scheduler = Scheduler(config, worker.pool, None, worker.local_pools)
    worker.device = FakeDevice(num_blocks, block_tokens, 8, worker.local_pools)
    worker.steps_ahead = 0
    return worker


def test_a_ticket_covers_all_tokens_except_the_one_just_sampled() -> None:
    worker = a_worker()
    worker.add(a_request(10, lease_id="l"))
    worker.step(0.0, {})
    last = worker.finishes["r"]
    assert last.finish is not None
    assert last.finish.reason == "handoff"
    assert last.ticket == KvTicket("W", "there", "l", 10, LEASE_S)
    assert len(worker.leases["l", 0].blocks) == 3
    assert worker.leases["l", 0].complete
    assert worker.pool.num_free == 32 - 3


@pytest.mark.parametrize("reaches", [(), (KvReach("window", 5),), (KvReach("chunk", 8), KvReach("window", 2))])
def test_decode_computes_no_token_that_it_can_pull(reaches: tuple[KvReach, ...]) -> None:
    for num_prompt in (1, 3, 4, 5, 8, 23):
        prefill, decode = a_worker(reaches=reaches), a_worker(reaches=reaches)
        prefill.add(a_request(num_prompt, lease_id="l"))
        prefill.step(0.0, {})
        ticket = prefill.finishes["r"].ticket
        first = prefill.answers["r"]
        decode.add(a_request(num_prompt, token_ids=[*range(num_prompt), *first], num_prompt=num_prompt, ticket=ticket))
        while decode.scheduler.has_work:
            decode.step(0.0, {"W": prefill})
        assert first + decode.answers["r"] == lone_run(a_request(num_prompt))
        assert decode.scheduler.counters.pulled_tokens == num_prompt
        assert decode.scheduler.counters.computed_tokens == 7  # the last of the 8 tokens needs no KV


def test_an_answer_of_one_token_holds_its_kv_for_routers_that_sample_it_again() -> None:
    worker = a_worker()
    worker.add(a_request(10, lease_id="l", max_new_tokens=1))
    worker.step(0.0, {})
    last = worker.finishes["r"]
    assert last.finish is not None
    assert last.finish.reason == "length"
    assert last.ticket is not None
    assert last.ticket.num_tokens == 10


def test_a_lease_expires() -> None:
    worker = a_worker()
    worker.add(a_request(10, lease_id="l"))
    worker.step(0.0, {})
    worker.step(LEASE_S - 1, {})
    assert worker.scheduler.num_held == 1
    worker.step(LEASE_S, {})
    assert worker.scheduler.num_held == 0
    assert worker.pool.num_free == 32


def test_an_engine_without_a_kv_server_rejects_leases() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 128, 8, "fake"), BlockPool(8))
    with pytest.raises(InvalidRequest) as refused:
        scheduler.add(a_request(4, lease_id="l"))
    assert refused.value.code == "no_handoff"


def test_a_lease_id_in_use_is_rejected() -> None:
    worker = a_worker()
    worker.add(a_request(10, lease_id="l"))
    worker.step(0.0, {})
    with pytest.raises(InvalidRequest) as refused:
        worker.scheduler.add(a_request(4, lease_id="l", request_id=RequestId("other")))
    assert refused.value.code == "duplicate_lease"


def test_a_ticket_for_more_tokens_than_the_request_has_is_ignored() -> None:
    worker = a_worker()
    worker.add(a_request(10, ticket=KvTicket("W", "there", "l", 11, LEASE_S)))
    while worker.scheduler.has_work:
        worker.step(0.0, {})
    assert worker.answers["r"] == lone_run(a_request(10))
