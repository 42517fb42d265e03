"""A client's body: the fields that are read, and edits that change nothing else."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from msgspec import UNSET, Raw

from stoker.base.errors import InvalidRequest
from stoker.gateway.api.client_body import (
    INTERNAL_FIELDS,
    MAX_CHOICES,
    EndpointKind,
    client_fields,
    edit,
    parse,
)

BODY = b'{ "model": "m",\n "temperature": 0.70, "messages": [{"role":"user","content":"\\u00e9 {\\"seed\\":1}"}], "x": 1e2 }'


def test_only_the_fields_that_matter_are_read_and_the_large_ones_stay_bytes() -> None:
    envelope = parse(EndpointKind.CHAT, BODY)
    assert envelope.model == "m"
    assert envelope.seed is UNSET
    assert isinstance(envelope.messages, Raw)
    assert bytes(envelope.messages) == b'[{"role":"user","content":"\\u00e9 {\\"seed\\":1}"}]'
    assert (envelope.kind, envelope.raw) == (EndpointKind.CHAT, BODY)


def test_an_absent_key_is_inserted_and_every_other_byte_stays() -> None:
    edited = edit(parse(EndpointKind.CHAT, BODY), {"seed": b"7", "cache_salt": b'"t"'})
    assert edited == b'{"seed":7,"cache_salt":"t",' + BODY[1:]
    assert json.loads(edited) == {**json.loads(BODY), "seed": 7, "cache_salt": "t"}


@pytest.mark.parametrize("body", [b"{}", b" {  }", b'\n{"n":2}'])
def test_insertion_leaves_valid_json(body: bytes) -> None:
    assert json.loads(edit(parse(EndpointKind.CHAT, body), {"seed": b"7"})) == {**json.loads(body), "seed": 7}


def test_an_existing_field_is_replaced_in_place_even_if_it_is_null() -> None:
    envelope = parse(EndpointKind.CHAT, b'{"seed": null, "messages": [1.50,  "\\/"], "z": 1}')
    assert edit(envelope, {"seed": b"7"}) == b'{"seed":7,"messages":[1.50,  "\\/"],"z":1}'


def test_dropping_keeps_the_values_of_the_rest_as_they_are_written() -> None:
    envelope = parse(EndpointKind.CHAT, b'{"rejectIfBusy": true, "a": 1.0, "b": [ 2 ]}')
    assert envelope.reject_if_busy is True
    assert edit(envelope, {}, ["rejectIfBusy"]) == b'{"a":1.0,"b":[ 2 ]}'


def test_an_unchanged_body_is_the_very_same_bytes() -> None:
    assert edit(parse(EndpointKind.CHAT, BODY), {}) is BODY


@pytest.mark.parametrize("name", INTERNAL_FIELDS)
def test_what_workers_and_gateway_say_to_each_other_no_client_may_say(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        parse(EndpointKind.CHAT, json.dumps({"model": "m", name: {"a": 1}}).encode())
    assert refused.value.param == name
    assert parse(EndpointKind.CHAT, json.dumps({"model": "m", name: None}).encode()).model == "m"


@pytest.mark.parametrize(("said", "bound"), [("7", 7), ("0", 0), ("-1", None), ("-1000000000", None), ("null", None)])
def test_a_bound_below_zero_is_no_bound(said: str, bound: int | None) -> None:
    assert parse(EndpointKind.CHAT, f'{{"max_tokens": {said}}}'.encode()).max_new_tokens == bound


def test_an_escaped_name_is_the_same_name() -> None:
    with pytest.raises(InvalidRequest, match="kv_transfer_params"):
        parse(EndpointKind.CHAT, b'{"kv_transfer_p\\u0061rams": {"do_remote_decode": true}}')


def test_an_internal_field_that_is_null_is_replaced_not_doubled() -> None:
    envelope = parse(EndpointKind.CHAT, b'{"model":"m","resume":null}')
    assert edit(envelope, {"resume": b'{"a":1}'}) == b'{"model":"m","resume":{"a":1}}'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"[1]", None),
        (b"{", None),
        (b'{"n":"two"}', "n"),
        (b'{"n":1000000000}', "n"),
        (b'{"n":%b}' % (b"9" * 4000), "n"),
        (b'{"max_tokens":1e400}', "max_tokens"),
        (b'{"stream_options":3}', "stream_options"),
        (b"\xff", None),
        (b'{"a\xff":1}', None),
        (b'{"a":"\xff"}', None),
        (b'{"messages":"\xed\xa0\x80"}', None),
        (b'{"messages":"' + b"a" * 65536 + b'\xc3"}', None),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        *(
            (f'{{"{name}":{value}}}'.encode(), name)
            for name in ("user", "prompt_cache_key", "session_id")
            for value in ("true", "1.5", "[1]", '{"id":1}', f'"{"x" * 513}"')
        ),
        (b'{"model":"%b"}' % (b"x" * 513), "model"),
        (b'{"cache_salt":"%b"}' % (b"x" * 513), "cache_salt"),
        (b'{"cache_salt":7}', "cache_salt"),
    ],
)
def test_a_body_that_is_wrong_is_refused_with_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(EndpointKind.CHAT, body)
    assert refused.value.param == param


def test_text_that_is_not_ascii_is_read_across_slices() -> None:
    body = '{"user":"é","messages":"'.encode() + "日本語".encode() * 30_000 + b'"}'
    assert parse(EndpointKind.CHAT, body).user == "é"


def test_a_field_may_be_given_twice_or_be_as_long_as_allowed() -> None:
    envelope = parse(EndpointKind.CHAT, b'{"user":"a","user":"%b","n":1,"n":2}' % (b"x" * 512))
    assert (envelope.user, envelope.n) == ("x" * 512, 2)


@pytest.mark.parametrize("name", ["model", "user", "prompt_cache_key", "session_id", "cache_salt"])
def test_a_huge_name_is_refused_without_decoding_it(name: str) -> None:
    body = f'{{"model":"m","messages":[],"{name}":"'.encode() + b"x" * (8 << 20) + "\U0001f600".encode() + b'"}'
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="512") as refused:
            parse(EndpointKind.CHAT, body)
        assert refused.value.param == name
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_large_body_with_ordinary_names_is_read() -> None:
    body = b'{"model":"m","user":"%b","messages":"%b"}' % (rb"\ud83d\ude00" * 512, b"x" * (2 << 20))
    assert parse(EndpointKind.CHAT, body).user == "\U0001f600" * 512


@pytest.mark.parametrize("prompt", [b'["",%b""]' % (b'"",' * 1_000_000), b"[[],%b[]]" % (b"[]," * 1_000_000)])
def test_counting_many_prompts_takes_no_memory(prompt: bytes) -> None:
    envelope = parse(EndpointKind.COMPLETIONS, b'{"prompt":%b}' % prompt)
    tracemalloc.start()
    try:
        assert envelope.num_prompts > MAX_CHOICES
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "body", "num_choices"),
    [
        (EndpointKind.CHAT, b'{"n":3}', 3),
        (EndpointKind.CHAT, b"{}", 1),
        (EndpointKind.COMPLETIONS, b'{"prompt":"a","n":2}', 2),
        (EndpointKind.COMPLETIONS, b'{"prompt":["a","b"],"n":2}', 4),
        (EndpointKind.COMPLETIONS, b'{"prompt":[[1,2],[3]]}', 2),
        (EndpointKind.COMPLETIONS, b'{"prompt":[ [1,2] ]}', 1),
        (EndpointKind.COMPLETIONS, b'{"prompt":[\n"a,\\"[", "\\\\", "c"]}', 3),
        (EndpointKind.COMPLETIONS, b'{"prompt":[]}', 1),
        (EndpointKind.COMPLETIONS, b'{"prompt":[1,2,3]}', 1),
        (EndpointKind.COMPLETIONS, b'{"prompt":["a",[1,2],"b]"]}', 3),
        (EndpointKind.RESPONSES, b'{"input":["a","b"]}', 1),
    ],
)
def test_how_many_choices_an_answer_will_have(kind: EndpointKind, body: bytes, num_choices: int) -> None:
    assert parse(kind, body).num_choices == num_choices


def test_names_of_our_own_in_a_clients_body_change_nothing() -> None:
    envelope = parse(EndpointKind.CHAT, b'{"raw":1,"kind":"x","model":"m"}')
    assert envelope.kind is EndpointKind.CHAT
    assert envelope.raw == b'{"raw":1,"kind":"x","model":"m"}'


def test_a_body_of_very_many_fields_is_refused_and_a_long_conversation_is_not() -> None:
    many = b"{%b}" % b",".join(b'"%d":1' % number for number in range(100_000))
    with pytest.raises(InvalidRequest, match="100000 fields") as refused:
        parse(EndpointKind.CHAT, many)
    assert refused.value.code == "too_many_fields"
    parse(EndpointKind.CHAT, b'{"messages": %b, "tools": [%b]}' % (many, many))
    parse(EndpointKind.CHAT, b'{"messages": [], "prediction": "%b"}' % (b"x" * (1 << 20)))
    with pytest.raises(InvalidRequest, match="100000 fields"):
        client_fields(many)
    assert set(client_fields(b'{"messages": %b, "documents": [%b], "query": 1}' % (many, many))) == {
        "messages",
        "documents",
        "query",
    }
    for wrong in (b"[]", b"{", b'"x"'):
        with pytest.raises(InvalidRequest):
            client_fields(wrong)
