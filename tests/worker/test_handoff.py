"""Hand-offs over HTTP: the request, what the engine gets, and the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fake_engine import ENGINE_ID, KV_ADDRESS, FakeService, byte_text
from http_server import Answer, Server, run_server
from resume_notes import Block, Seen, blocks_of, shown
from signing import signed
from test_resume import by_choice, by_seed

from stoker.gateway.path.resume import StokerStream, TokenMemory
from stoker.kv.blocks.transfer import KvTicket
from stoker.proto.messages import Prefetch, TierReport
from stoker.worker.config import HttpConfig
from stoker.worker.identity import Identity

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello"}]}
USAGE = {"stream_options": {"include_usage": True}}
KEEP: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "x.1"}}
# As vLLM's proxies send it.
VLLM_KEEP: dict[str, Any] = {
    "kv_transfer_params": {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
}
TRANSFER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_mode": "stoker",
    "remote_engine_id": ENGINE_ID,
    "remote_host": "10.0.0.7",
    "remote_port": 7001,
    "remote_request_id": "x.1-0",
    "remote_num_tokens": 40,
    "remote_block_ids": [],
    "lease_s": 30.0,
}
TICKET = KvTicket(ENGINE_ID, KV_ADDRESS, "x.1-0", 40, 30.0)
BEGINS = {"resume": {"created": 1763186401, "choices": [{}]}}  # begins here, with the same time in every answer
OUR_STREAM = {"X-Request-Id": "r-1", "x-stoker-stream": "1"}


def make_server(kv_address: str | None, identity: Identity | None = None) -> Server:
    text = byte_text()
    service = FakeService(text.tokenizer)
    service.info = msgspec.structs.replace(
        service.info, kv_address=kv_address, engine_id=ENGINE_ID, stores={"CPU": "s-1"}
    )
    return Server(service, text, HttpConfig(served_names=("tiny",)), identity=identity or Identity())


@pytest.fixture
def worker() -> Iterator[Server]:
    server = make_server(KV_ADDRESS)
    stop = run_server(server)
    yield server
    stop()


@pytest.fixture(scope="module")
def decoder() -> Iterator[Server]:
    """A worker that keeps no KV for others."""
    server = make_server(None)
    stop = run_server(server)
    yield server
    stop()


def transfers_of(blocks: list[Block]) -> Any:
    """Return the ticket of a stream that must end with a hand-off."""
    *lines, last = blocks[-1].lines
    assert not lines
    assert not blocks[-1].event
    assert not any(line.startswith((b":k", b":e")) for block in blocks[:-1] for line in block.lines)
    return json.loads(last.removeprefix(b":k "))


# ---- requests

BAD: list[tuple[Any, str]] = [
    (3, "kv_transfer_params"),
    ([], "kv_transfer_params"),
    ({"do_remote_decode": "yes"}, "kv_transfer_params.do_remote_decode"),
    ({"do_remote_prefill": 1}, "kv_transfer_params.do_remote_prefill"),
    ({"do_remote_decode": True, "do_remote_prefill": True}, "kv_transfer_params"),
    ({"do_remote_decode": True, "transfer_id": ""}, "kv_transfer_params.transfer_id"),
    ({"do_remote_decode": True, "transfer_id": "a b"}, "kv_transfer_params.transfer_id"),
    ({"do_remote_decode": True, "transfer_id": "a\n"}, "kv_transfer_params.transfer_id"),
    ({"do_remote_decode": True, "transfer_id": "x" * 129}, "kv_transfer_params.transfer_id"),
    ({"do_remote_decode": True, "transfer_id": 7}, "kv_transfer_params.transfer_id"),
    *(
        ({name: value for name, value in TRANSFER.items() if name != left_out}, f"kv_transfer_params.{left_out}")
        for left_out in ("remote_engine_id", "remote_host", "remote_port", "remote_request_id")
    ),
    *(
        (TRANSFER | {name: value}, f"kv_transfer_params.{name}")
        for name, value in (
            ("remote_engine_id", ""),
            ("remote_host", None),
            ("remote_port", 0),
            ("remote_port", 70000),
            ("remote_port", "7001"),
            ("remote_request_id", "a/b"),
            ("remote_request_id", "x" * 145),
            ("remote_num_tokens", -1),
            ("remote_num_tokens", 1.5),
            ("lease_s", 0),
            ("choices", 3),
            ("choices", []),
            ("choices", [None, None]),
        )
    ),
    (TRANSFER | {"choices": [TRANSFER | {"remote_port": 0}]}, "kv_transfer_params.choices[0].remote_port"),
]


@pytest.mark.parametrize(("params", "param"), BAD, ids=[str(params)[:80] for params, _ in BAD])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_a_wrong_field_is_named(worker: Server, path: str, params: Any, param: str) -> None:
    prompt = {CHAT: USER, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}[path]
    answer = worker.send(path, prompt | {"kv_transfer_params": params})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert worker.service.requests == []


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": None, "x": [1]}], ids=str
)
def test_a_request_without_a_handoff_is_unchanged(decoder: Server, params: Any) -> None:
    answer = decoder.chat(kv_transfer_params=params)
    assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "Hello, world")
    assert "kv_transfer_params" not in answer.json
    asked = decoder.service.requests[-1]
    assert (asked.lease_id, asked.ticket) == (None, None)


def test_a_worker_that_keeps_no_kv_says_which_option_enables_it(decoder: Server) -> None:
    answer = decoder.chat(**KEEP)
    assert (answer.status, answer.error["param"]) == (400, "kv_transfer_params.do_remote_decode")
    assert "--role prefill" in answer.error["message"]


FOREIGN = [
    {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2], [3]],
        "remote_engine_id": "9f0c",
        "remote_request_id": "cmpl-/ x",
        "remote_host": "10.0.0.2",
        "remote_port": 5600,
        "tp_size": 2,
        "remote_blocks_expiry_time": 17.5,
        "transfer_mode": "pull",
    },
    {"do_remote_prefill": True, "transfer_id": "xfer/1", "remote_bootstrap_addr": "http://p:8998"},
]


@pytest.mark.parametrize("params", FOREIGN, ids=["nixl", "mooncake"])
def test_the_ticket_of_another_engine_is_ignored(decoder: Server, params: Any) -> None:
    answer = decoder.chat(kv_transfer_params=params)
    assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "Hello, world")
    assert decoder.service.requests[-1].ticket is None


# ---- keeping, for our gateway


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, USER | USAGE), (COMPLETIONS, {"prompt": "Once"} | USAGE), (RESPONSES, {"input": "hi"})],
    ids=["chat", "completions", "responses"],
)
@pytest.mark.parametrize("text", ["Hellö ✓", "✓", "<tool"])
def test_a_stream_continues_elsewhere_after_its_first_token(worker: Server, path: str, body: Any, text: str) -> None:
    worker.say(text, cached_tokens=16)
    body = body | BEGINS | {"stream": True, "seed": 5}
    whole = blocks_of(worker.send(path, body, **OUR_STREAM).body)
    first = blocks_of(worker.send(path, body | KEEP, **OUR_STREAM).body)
    asked = worker.service.requests[-1]
    assert (asked.lease_id, asked.ticket) == ("x.1-0", None)
    transfer = transfers_of(first)
    assert transfer == TRANSFER | {"remote_num_tokens": len(asked.token_ids)}
    seen = Seen().read(first[:-1])
    assert (len(seen.tokens[0]), seen.finished, seen.ended) == (1, set(), False)

    num_events = {"events": len(shown(first))} if path == RESPONSES else {}
    pull = {"resume": seen.resume(1, **num_events), "kv_transfer_params": transfer}
    rest = blocks_of(worker.send(path, body | pull, **OUR_STREAM).body)
    assert shown(first) + shown(rest) == shown(whole)
    told = worker.service.requests[-1]
    assert told.ticket == KvTicket(ENGINE_ID, KV_ADDRESS, "x.1-0", len(asked.token_ids), 30.0)
    assert told.token_ids == [*asked.token_ids, *map(int, seen.tokens[0])]
    assert (told.num_prompt, told.lease_id) == (asked.num_prompt, None)


def test_an_answer_that_is_not_streamed_continues_elsewhere_too(worker: Server) -> None:
    worker.say("Hellö ✓", cached_tokens=16)
    first = blocks_of(worker.send(CHAT, USER | KEEP | {"stream": True, "seed": 5}, **OUR_STREAM).body)
    worker.say("Hellö ✓", pulled_tokens=24)
    pull = {"resume": Seen().read(first[:-1]).resume(1), "kv_transfer_params": transfers_of(first)}
    answer = worker.send(CHAT, USER | pull | {"seed": 5}, X_Request_Id="r-1").json
    assert answer["choices"][0]["message"]["content"] == "Hellö ✓"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, (
        "what was pulled was counted where it was made"
    )
    assert "kv_transfer_params" not in answer


def test_a_choice_that_has_ended_is_not_handed_off(worker: Server) -> None:
    seeds: list[int] = []
    worker.say(lambda request: seeds.append(request.sampling.seed) or "")
    worker.send(CHAT, USER | {"n": 3, "seed": 5})
    silent = sorted(seeds)[1]
    worker.say(lambda request: "" if request.sampling.seed == silent else "abc✓")
    begins = {"resume": {"created": 1763186401, "choices": [{}, {}, {}]}}
    body = USER | USAGE | begins | {"n": 3, "seed": 5, "stream": True}
    whole = blocks_of(worker.send(CHAT, body, **OUR_STREAM).body)
    first = blocks_of(worker.send(CHAT, body | KEEP, **OUR_STREAM).body)
    transfer = transfers_of(first)
    seen = Seen().read(first[:-1])
    (ended,) = seen.finished
    assert {name: transfer[name] for name in transfer if name != "choices"} == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_mode": "stoker",
    }
    names = [choice and choice["remote_request_id"] for choice in transfer["choices"]]
    assert names == [None if i == ended else f"x.1-{i}" for i in range(3)]
    num_before = len(worker.service.requests)
    pull = {"resume": seen.resume(3), "kv_transfer_params": transfer}
    rest = blocks_of(worker.send(CHAT, body | pull, **OUR_STREAM).body)
    assert by_choice(shown(first) + shown(rest)) == by_choice(shown(whole))
    pulled = {request.ticket.lease_id for request in worker.service.requests[num_before:] if request.ticket}
    assert pulled == {name for name in names if name}


def test_every_prompt_and_choice_has_a_lease(worker: Server) -> None:
    worker.say(by_seed)
    body = {"prompt": ["a", "bc"], "n": 2, "seed": 5}
    answer = worker.send(COMPLETIONS, body | VLLM_KEEP).json
    leases = [request.lease_id for request in worker.service.requests]
    assert len(set(leases)) == 4
    given = [choice["remote_request_id"] for choice in answer["kv_transfer_params"]["choices"] if choice]
    assert set(given) <= set(leases)
    worker.send(COMPLETIONS, body | {"kv_transfer_params": answer["kv_transfer_params"]})
    assert [r.ticket and r.ticket.lease_id for r in worker.service.requests[4:]] == [
        choice and choice["remote_request_id"] for choice in answer["kv_transfer_params"]["choices"]
    ]


@pytest.mark.parametrize(
    ("text", "fields"),
    [("", {}), ("Hello", {"max_tokens": 1}), ("Hello", {"stop": ["H"]}), ("Hello", {"stop": ["H"], "max_tokens": 1})],
    ids=["stop-token", "length", "stop-string", "both"],
)
def test_an_answer_of_one_token_ends_without_a_handoff(worker: Server, text: str, fields: dict[str, Any]) -> None:
    worker.say(text)
    body = USER | USAGE | BEGINS | {"stream": True, "seed": 5} | fields
    whole = worker.send(CHAT, body, **OUR_STREAM).body
    kept = worker.send(CHAT, body | KEEP, **OUR_STREAM).body
    assert shown(blocks_of(kept)) == shown(blocks_of(whole))
    assert b"[DONE]" in kept
    if "max_tokens" in fields:
        assert worker.service.requests[-1].lease_id is None, "its lease would never be used"
    elif "stop" in fields:
        assert worker.service.released == [worker.service.requests[-1].lease_id]


def test_a_resumed_answer_can_be_handed_off_again(worker: Server) -> None:
    """A prefill and a decode worker continue an answer: prefill samples one more token."""
    worker.say("Hello")
    body = USER | {"stream": True, "seed": 5}
    whole = blocks_of(worker.send(CHAT, body, **OUR_STREAM).body)
    resume = Seen().read(whole[:2]).resume(1)
    second = blocks_of(worker.send(CHAT, body | KEEP | {"resume": resume}, **OUR_STREAM).body)
    assert shown(second) == shown(whole[2:3])
    assert transfers_of(second)["remote_num_tokens"] == worker.service.requests[0].num_prompt + 2


@pytest.mark.parametrize("cut", [None, 1, 7], ids=str)
def test_the_gateway_reads_the_handoff_note(worker: Server, cut: int | None) -> None:
    worker.say("Hello", cached_tokens=16)
    body = worker.send(CHAT, USER | KEEP | {"stream": True, "seed": 5}, **OUR_STREAM).body
    memory = TokenMemory()
    stream = StokerStream(memory)
    step = cut or len(body)
    got = b"".join(stream.push(body[i : i + step]) for i in range(0, len(body), step))
    assert b"do_remote" not in got
    assert not stream.is_complete
    assert memory.notes.ticket is not None
    assert json.loads(memory.notes.ticket)["remote_request_id"] == "x.1-0"
    (choice,) = json.loads(memory.resume_field(1))["choices"]
    assert (len(choice["token_ids"]), choice["finished"], memory.cached_tokens) == (1, False, 16)


# ---- keeping, for vLLM's proxies


def test_vllms_proxies_get_one_token_and_a_ticket(worker: Server) -> None:
    worker.say("Hello", cached_tokens=16)
    answer = worker.chat(max_tokens=1, max_completion_tokens=1, stream=False, **VLLM_KEEP).json
    asked = worker.service.requests[-1]
    assert asked.lease_id is not None
    assert asked.lease_id.endswith("-0")
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == ("H", "length")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    expected = {"remote_request_id": asked.lease_id, "remote_num_tokens": len(asked.token_ids)}
    assert answer["kv_transfer_params"] == TRANSFER | expected
    worker.chat(stream=True, kv_transfer_params=answer["kv_transfer_params"])
    told = worker.service.requests[-1]
    assert told.ticket == replace(TICKET, lease_id=asked.lease_id, num_tokens=len(asked.token_ids))
    assert told.token_ids == asked.token_ids


def test_with_a_lease_the_answer_ends_after_one_token(worker: Server) -> None:
    worker.say("✓ Hello")
    answer = worker.chat(max_tokens=50, **VLLM_KEEP).json
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (1, "length")
    assert answer["kv_transfer_params"]["do_remote_prefill"] is True


def last_chunk(answer: Answer) -> Any:
    assert answer.events[-1].is_done
    assert not any("kv_transfer_params" in chunk for chunk in answer.chunks[:-1])
    return answer.chunks[-1]


@pytest.mark.parametrize("usage", [{}, USAGE], ids=["plain", "usage"])
@pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, USER), (COMPLETIONS, {"prompt": "x"})], ids=["chat", "completions"]
)
def test_a_stream_without_notes_has_the_ticket_in_its_last_chunk(
    worker: Server, path: str, prompt: Any, usage: Any
) -> None:
    answer = worker.send(path, prompt | usage | VLLM_KEEP | {"stream": True, "max_tokens": 1})
    last = last_chunk(answer)
    assert last["choices"] == []
    assert last["kv_transfer_params"]["remote_engine_id"] == ENGINE_ID
    assert ("usage" in last) == bool(usage)
    assert [c["choices"][0]["finish_reason"] for c in answer.chunks[:-1]][-1] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_contains_the_ticket(worker: Server, stream: bool) -> None:
    answer = worker.send(RESPONSES, {"input": "hi", "max_output_tokens": 1, "stream": stream} | VLLM_KEEP)
    whole = answer.chunks[-1]["response"] if stream else answer.json
    assert whole["status"] == "incomplete"
    assert whole["kv_transfer_params"]["remote_host"] == "10.0.0.7"


def test_an_ipv6_address_is_split_correctly() -> None:
    server = make_server("[fd00::7]:7001")
    stop = run_server(server)
    try:
        params = TRANSFER | {"remote_host": "fd00::7"}
        assert server.chat(kv_transfer_params=params).status == 200
        assert server.service.requests[-1].ticket == replace(TICKET, address="[fd00::7]:7001")
    finally:
        stop()


# ---- prefetch


def test_a_prefetch_is_passed_to_the_engine(worker: Server) -> None:
    assert worker.send("/stoker/prefetch", {"kv_transfer_params": TRANSFER}).status == 202
    assert worker.service.prefetched.pop() == Prefetch(token_ids=[], ticket=TICKET)
    request = USER | {"cache_salt": "tenant", "max_tokens": 4}
    answer = worker.send("/stoker/prefetch", {"request": request, "kv_transfer_params": TRANSFER})
    assert (answer.status, answer.body) == (202, b"")
    hint = worker.service.prefetched.pop()
    worker.send(CHAT, request)
    assert hint == Prefetch(token_ids=worker.service.requests[-1].token_ids, cache_salt="tenant", ticket=TICKET)
    body = {"path": COMPLETIONS, "request": {"prompt": ["a", "bc"], "n": 2}}
    assert worker.send("/stoker/prefetch", body).status == 202
    assert [(len(hint.token_ids), hint.ticket) for hint in worker.service.prefetched] == [(1, None), (2, None)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "request"),
        ({"requests": {}}, "requests"),
        ({"path": "/v1/embeddings", "request": {}}, "path"),
        ({"request": {"messages": 3}}, "messages"),
        ({"request": {"prompt": "x"}}, "messages"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params.do_remote_decode"),
        ({"kv_transfer_params": TRANSFER | {"remote_port": 0}}, "kv_transfer_params.remote_port"),
    ],
    ids=str,
)
def test_an_invalid_prefetch_is_refused(worker: Server, body: Any, param: str) -> None:
    answer = worker.send("/stoker/prefetch", body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert worker.service.prefetched == []


def test_hints_of_gateways_need_the_secret() -> None:
    server = make_server(None, Identity(secret="open sesame"))
    stop = run_server(server)
    try:
        for path, body in (
            ("/stoker/prefetch", {"kv_transfer_params": TRANSFER}),
            ("/stoker/release", {"transfer_id": "x.1"}),
        ):
            assert server.send(path, body).status == 401
            assert (
                server.send(path, body, **signed(server.url, "open sesame", path, json.dumps(body).encode())).status
                == 202
            )
    finally:
        stop()


def test_a_release_ends_the_leases_of_its_transfer_id(worker: Server) -> None:
    worker.say("Hello")
    worker.send(CHAT, USER | KEEP | {"n": 2, "stream": True}, **OUR_STREAM)
    answer = worker.send("/stoker/release", {"transfer_id": "x.1", "num_choices": 2})
    assert (answer.status, answer.body) == (202, b"")
    assert worker.service.released == [request.lease_id for request in worker.service.requests]
    for body in ({}, {"transfer_id": "../x"}, {"transfer_id": "x", "num_choices": 0}, {"transfer_id": "x", "n": 1}):
        assert worker.send("/stoker/release", body).status == 400


# ---- the worker's description


def test_the_worker_tells_its_kv_address(worker: Server, decoder: Server) -> None:
    answer = worker.send("/stoker/worker").json
    assert (answer["engine_id"], answer["kv_address"], answer["stores"]) == (ENGINE_ID, KV_ADDRESS, {"CPU": "s-1"})
    assert decoder.send("/stoker/worker").json["kv_address"] is None


def tier(name: str, **fields: Any) -> TierReport:
    counts = ("hits", "misses", "read_bytes", "written_bytes", "declined", "evicted", "corrupt", "errors")
    sizes = {"blocks": 3, "used_bytes": 300, "capacity_bytes": 900, "read_s": 0.5, "write_s": 0.25}
    zeros = dict.fromkeys(counts, 0)
    return TierReport(
        **{"name": name, "medium": "CPU", "bytes_per_s": None, "crossover_tokens": None} | sizes | zeros | fields
    )


def test_metrics_of_tiers(start_server: Callable[..., Server]) -> None:
    server = start_server()
    tiers = [tier("host", hits=7, bytes_per_s=2e9, crossover_tokens=64), tier("disk", medium="DISK", corrupt=1)]
    assert server.service.stats is not None
    server.service.stats = msgspec.structs.replace(
        server.service.stats, tiers=tiers, pulled_tokens=48, held_leases=2, failed_loads=1
    )
    lines = server.send("/metrics").body.decode().splitlines()
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert values['stoker_kv_tier_hits_total{tier="host"}'] == 7
    assert values['stoker_kv_tier_corrupt_total{tier="disk"}'] == 1
    assert values['stoker_kv_tier_read_seconds_total{tier="disk"}'] == 0.5
    assert values['stoker_kv_tier_read_bytes_per_second{tier="host"}'] == 2e9
    assert values['stoker_kv_tier_crossover_tokens{tier="host"}'] == 64
    assert 'stoker_kv_tier_crossover_tokens{tier="disk"}' not in values
    assert (values["stoker_kv_leases"], values["stoker_kv_pulled_tokens_total"]) == (2, 48)
    assert values["stoker_kv_failed_loads_total"] == 1
