"""An answer that was cut after any event continues on another worker with the same bytes, without repetition."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from http_server import Server
from resume_notes import Seen, blocks_of, cuts, shown
from test_protocol import CALL, THINKING, TOOLS

from stoker.proto.openai.fields import choice_seed
from stoker.sched.request import GenerateRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
USER = {"messages": [{"role": "user", "content": "Say hello"}]}
FLAT_TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
LOGGED = {"logprobs": True, "top_logprobs": 3}
USAGE = {"stream_options": {"include_usage": True}}


def by_seed(request: GenerateRequest) -> str:
    rng = random.Random(request.sampling.seed)
    return "".join(rng.choice("abc é✓🦊<") for _ in range(rng.randint(0, 20)))


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "plain": (CHAT, "Hello, world", USER),
    "usage": (CHAT, "Hello, world", USER | USAGE),
    "utf8": (CHAT, "Hellö ✓ 🦊", USER | USAGE),
    "utf8-logprobs": (CHAT, "Hellö ✓ 🦊", USER | LOGGED),
    "stop": (CHAT, "one two three four", USER | {"stop": ["two th", "four"]}),
    "stop-kept": (CHAT, "one two three", USER | {"stop": ["two"], "include_stop_str_in_output": True}),
    "stop-logprobs": (CHAT, "one two three four", USER | LOGGED | {"stop": ["two three five", "four"]}),
    "length": (CHAT, "short", USER | {"max_tokens": 3}),
    "stop-token": (CHAT, "ab", USER | {"include_stop_str_in_output": True, "skip_special_tokens": False}),
    "token-ids": (CHAT, "Hé!", USER | {"return_token_ids": True}),
    "tools": (CHAT, f"Let me see.\n{CALL}\n{CALL}", USER | USAGE | {"tools": TOOLS}),
    "tools-logprobs": (CHAT, f"Look <tool.\n{CALL}", USER | LOGGED | {"tools": TOOLS}),
    "forced": (CHAT, CALL, USER | {"tools": TOOLS, "tool_choice": "required"}),
    "forced-cut": (CHAT, CALL, USER | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60}),
    "schema": (CHAT, '{"a": "é"}', USER | {"response_format": SCHEMA}),
    "thinking": (CHAT, "I wonder…\n</think>\n\nYes <thi", USER | USAGE),
    "empty": (CHAT, "", USER | USAGE),
    "three": (CHAT, by_seed, USER | USAGE | {"n": 3, "temperature": 1}),
    "three-logprobs": (CHAT, by_seed, USER | LOGGED | {"n": 3, "stop": ["ab", "é✓"]}),
    "three-tools": (CHAT, CALL, USER | {"n": 3, "tools": TOOLS, "tool_choice": "required"}),
    "completion": (COMPLETIONS, "and so on ✓", {"prompt": "Once"} | USAGE),
    "echo": (COMPLETIONS, "and so on ✓", {"prompt": "Once upön ", "echo": True}),
    "completion-logprobs": (COMPLETIONS, "naïve end", {"prompt": "x", "logprobs": 2, "stop": ["ende", "d"]}),
    "prompts": (COMPLETIONS, by_seed, {"prompt": ["a", "bc"], "n": 2, "echo": True} | USAGE),
    "responses": (RESPONSES, "Hellö ✓", {"input": "hi"}),
    "responses-length": (RESPONSES, "Hellö ✓", {"input": "hi", "max_output_tokens": 4}),
    "responses-tools": (RESPONSES, f"See.\n{CALL}\n{CALL}", {"input": "hi", "tools": FLAT_TOOLS}),
    "responses-thinking": (RESPONSES, "Hm…\n</think>\n\nYes", {"input": "hi"}),
    "responses-logprobs": (RESPONSES, "é <tool", {"input": "hi", "top_logprobs": 2, "tools": FLAT_TOOLS}),
}


def by_choice(events: list[bytes]) -> dict[object, list[bytes]]:
    """Choices of one stream may come in any order. The events of one choice may not."""
    found: dict[object, list[bytes]] = {}
    for event in events:
        data = event.removeprefix(b"data: ")
        choices = json.loads(data)["choices"] if data != b"[DONE]" else []
        found.setdefault(choices[0]["index"] if choices else None, []).append(event)
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk_tokens", [1, 3])
def test_a_stream_cut_after_any_event_continues_with_the_same_bytes(
    start_server: Callable[..., Server], name: str, chunk_tokens: int
) -> None:
    path, text, fields = CASES[name]
    server = start_server(THINKING if "thinking" in name else None)
    server.say(text, chunk_tokens=chunk_tokens)
    num_choices = fields.get("n", 1) * (len(fields["prompt"]) if name == "prompts" else 1)
    body = fields | {"stream": True, "seed": 5}
    headers = {"X-Request-Id": "r-1", "x-stoker-stream": "1"}
    whole = server.send(path, body, **headers)
    assert whole.status == 200, whole.body
    blocks = blocks_of(whole.body)
    assert Seen().read(blocks).seed == 5
    places = cuts(blocks)
    assert len(places) >= min(3, len(shown(blocks)) - 2)
    for count in places:
        seen = Seen().read(blocks[:count])
        num_events = {"events": len(shown(blocks[:count]))} if path == RESPONSES else {}
        resumed = server.send(path, body | {"resume": seen.resume(num_choices, **num_events)}, **headers)
        assert resumed.status == 200, resumed.body
        rest = blocks_of(resumed.body)
        expected = shown(blocks[count:])
        if num_choices > 1:
            assert by_choice(shown(rest)) == by_choice(expected), count
        else:
            assert shown(rest) == expected, count
        both = Seen().read(blocks[:count]).read(rest)
        everything = Seen().read(blocks)
        assert (both.tokens, both.finished) == (everything.tokens, everything.finished)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == RESPONSES])
def test_a_response_cut_between_the_events_of_one_token_continues(
    start_server: Callable[..., Server], name: str
) -> None:
    path, text, fields = CASES[name]
    server = start_server(THINKING if "thinking" in name else None)
    server.say(text)
    body = fields | {"stream": True, "seed": 5}
    headers = {"X-Request-Id": "r-1", "x-stoker-stream": "1"}
    blocks = blocks_of(server.send(path, body, **headers).body)
    groups = [i for i, block in enumerate(blocks) if not block.lines]
    assert groups, "events that share their token's line with the one before them"
    for i in groups:
        seen = Seen().read(blocks[: i + 1])
        for sent in range(i, len(blocks)):
            if blocks[sent].lines:
                break
            resume = seen.resume(1, events=len(shown(blocks[:sent])))
            rest = server.send(path, body | {"resume": resume}, **headers).body
            assert shown(blocks_of(rest)) == shown(blocks[sent:])


@pytest.mark.parametrize("name", CASES)
def test_an_answer_that_is_not_streamed_contains_the_resumed_tokens(
    start_server: Callable[..., Server], name: str
) -> None:
    path, text, fields = CASES[name]
    server = start_server(THINKING if "thinking" in name else None)
    server.say(text, cached_tokens=1)
    fields = {key: value for key, value in fields.items() if key != "stream_options"} | {"seed": 5}
    num_choices = fields.get("n", 1) * (len(fields["prompt"]) if name == "prompts" else 1)
    headers = {"X-Request-Id": "r-1", "x-stoker-stream": "1"}
    blocks = blocks_of(server.send(path, fields | {"stream": True}, **headers).body)
    first = Seen().read(blocks).resume(num_choices)
    whole = server.send(path, fields | {"resume": {**first, "choices": [{}] * num_choices}}, X_Request_Id="r-1").json
    for count in cuts(blocks):
        resume = Seen().read(blocks[:count]).resume(num_choices)
        answer = server.send(path, fields | {"resume": resume}, X_Request_Id="r-1").json
        for usage in (whole["usage"], answer["usage"]):  # each worker has its own cache
            for details in ("prompt_tokens_details", "input_tokens_details"):
                usage.pop(details, None)
        assert answer == whole, count


def test_without_the_header_there_are_no_notes(server: Server) -> None:
    body = server.chat(stream=True).body
    assert not [line for line in body.splitlines() if line.startswith(b":")]


def test_the_notes_hold_what_a_resume_needs(server: Server) -> None:
    server.say("Hé", cached_tokens=16)
    headers = {"x-stoker-stream": "1"}
    blocks = blocks_of(server.send(CHAT, USER | {"stream": True, "seed": 7}, **headers).body)
    ids = [*server.text.tokenizer.encode("Hé"), server.text.tokenizer.eos_token_ids[0]]
    prompt = server.service.requests[0].num_prompt
    created = blocks[0].data["created"]
    assert blocks[0].lines == [b":u %d 16 %d 7" % (prompt, created), b":t 0 %d" % ids[0]]
    assert blocks[0].data["choices"][0]["delta"] == {"role": "assistant", "content": "H"}
    assert (blocks[1].lines, blocks[1].event) == ([b":t 0 %d" % ids[1]], b""), "half a character shows nothing"
    assert blocks[2].lines == [b":t 0 %d" % ids[2]]
    assert blocks[3].lines == [b":t 0 %d" % ids[3], b":f 0"]
    assert (blocks[4].lines, blocks[4].event) == ([b":e"], b"data: [DONE]")


def test_a_seed_that_the_worker_chose_is_in_the_notes(server: Server) -> None:
    blocks = blocks_of(server.send(CHAT, USER | {"stream": True}, **{"x-stoker-stream": "1"}).body)
    assert Seen().read(blocks).seed == server.service.requests[0].sampling.seed


def test_an_engine_death_is_noted_before_the_error_event(server: Server) -> None:
    server.say("Hello", dies_after=2)
    blocks = blocks_of(server.send(CHAT, USER | {"stream": True}, **{"x-stoker-stream": "1"}).body)
    assert blocks[-1].lines == [b":x 503 engine_died"]
    assert blocks[-1].data["error"]["code"] == "engine_died"


def test_ids_are_a_function_of_the_request(server: Server) -> None:
    server.say(f"{CALL}\n{CALL}")

    def ids(request_id: str, **fields: Any) -> list[str]:
        answer = server.send(CHAT, USER | {"tools": TOOLS, "resume": RESUME} | fields, X_Request_Id=request_id).json
        return [answer["id"], *(call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"])]

    assert ids("a") == ids("a")
    assert len({*ids("a"), *ids("b")}) == 6
    other = {"messages": [{"role": "user", "content": "Say hello again"}]}
    assert len({*ids("a"), *ids("a", **other)}) == 6, "a client may use one id for all its requests"
    two = ids("a", n=2, resume={"created": 5, "choices": [{}, {}]})
    assert len(set(two)) == 5
    assert two[1].startswith("call_")
    assert len(two[1]) == len("call_") + 24


RESUME = {"created": 5, "choices": [{}]}


def test_two_requests_may_have_the_same_request_id(server: Server) -> None:
    server.chat()
    for _ in range(2):
        server.send(CHAT, USER, X_Request_Id="same")
    assert len({request.request_id for request in server.service.requests}) == 3


def test_a_resumed_request_goes_to_the_engine_with_its_tokens(server: Server) -> None:
    ids = server.text.tokenizer.encode("Hel")
    choices = [{"token_ids": ids}, {"token_ids": ids, "finished": True}, {}]
    answer = server.chat(stream=True, n=3, seed=9, max_tokens=20, resume={"created": 5, "choices": choices}, **USAGE)
    first, last = sorted(server.service.requests, key=lambda request: len(request.token_ids), reverse=True)
    assert first.token_ids[first.num_prompt :] == ids
    assert (first.sampling.seed, last.sampling.seed) == (9, choice_seed(9, 2))
    assert first.max_new_tokens == last.max_new_tokens == 20
    assert {chunk["created"] for chunk in answer.chunks} == {5}
    assert answer.chunks[-1]["usage"]["completion_tokens"] == 2 * len("Hello, world.") + 3
    assert "stoker_generated_tokens_total 23.0" in server.send("/metrics").body.decode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"resume": {"created": 5, "choices": []}}, "resume.choices"),
        ({"resume": {"created": 5, "choices": [{}, {}]}}, "resume.choices"),
        ({"resume": {"created": 5, "choices": [{"token_ids": [99999]}]}}, "resume.choices[0].token_ids[0]"),
        (
            {"resume": {"created": 5, "choices": [{"token_ids": [1, 2, 3]}]}, "max_tokens": 2},
            "resume.choices[0].token_ids",
        ),
        ({"resume": {"created": 5, "choices": [{"token_ids": [1]}]}, "logprobs": True}, "resume.choices[0].token_ids"),
        (
            {"resume": {"created": 5, "choices": [{"token_ids": [[1, 0.5, [2], []]]}]}, "logprobs": True},
            "resume.choices",
        ),
        ({"resume": {"created": -1, "choices": [{}]}}, "resume.created"),
        ({"resume": {"choices": [{}]}}, "resume.created"),
        ({"resume": {"created": 5, "choices": [{"what": 1}]}}, "resume.choices[0].what"),
    ],
    ids=str,
)
def test_an_invalid_resume_field_is_refused(shared: Server, fields: dict[str, Any], param: str) -> None:
    refused = shared.chat(stream=True, **fields)
    assert (refused.status, refused.error["param"]) == (400, param)
