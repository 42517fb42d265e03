"""What clients rely on beyond the tests with the official client: extensions, logprobs, reasoning."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from http_server import Server

from stoker.proto.openai.fields import choice_seed
from stoker.sched.request import GrammarSpec

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>'
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)


def joined(chunks: list[Any]) -> dict[str, Any]:
    """Return what a client collects from these chunks of one choice, without ids, which differ."""
    content, reasoning, finish = "", "", None
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            finish = choice["finish_reason"] or finish
            for call in delta.get("tool_calls") or ():
                parts = calls.setdefault(call["index"], [])
                parts += [call["function"].get("name", ""), call["function"]["arguments"]]
    texts = {index: "".join(parts) for index, parts in calls.items()}
    return {"content": content, "reasoning": reasoning, "calls": texts, "finish": finish}


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
def test_reasoning_is_split_off(start_server: Callable[..., Server], chunk_tokens: int) -> None:
    server = start_server(THINKING)
    server.say("Well…\n</think>\n\nYes", chunk_tokens=chunk_tokens)
    message = server.chat().json["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Well…", "Well…", "Yes")
    streamed = joined(server.chat(stream=True).chunks)
    assert (streamed["reasoning"], streamed["content"]) == ("Well…", "Yes")
    details = server.chat().json["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len("Well…".encode())
    whole = server.chat(separate_reasoning=False).json["choices"][0]["message"]
    assert whole["content"] == "Well…\n</think>\n\nYes"
    assert "reasoning_content" not in whole


def test_reasoning_in_the_responses_api(start_server: Callable[..., Server]) -> None:
    server = start_server(THINKING)
    server.say("Well…\n</think>\n\nYes")
    output = server.client().responses.create(model="tiny", input="?").output
    assert [item.type for item in output] == ["reasoning", "message"]
    assert output[0].content[0].text == "Well…"
    kinds = [json.loads(e.data)["type"] for e in server.send("/v1/responses", {"input": "?", "stream": True}).events]
    assert "response.reasoning_text.delta" in kinds
    assert kinds[-1] == "response.completed"


def test_a_constrained_answer_has_no_reasoning(start_server: Callable[..., Server]) -> None:
    server = start_server(THINKING)
    server.say('{"a": 1}')
    message = server.chat(response_format={"type": "json_object"}).json["choices"][0]["message"]
    assert message["content"] == '{"a": 1}'
    prompt = server.text.tokenizer.decode(server.service.requests[-1].token_ids)
    assert prompt.endswith("<think>\n\n</think>\n\n")
    server.chat(reasoning_effort="none")
    assert server.text.tokenizer.decode(server.service.requests[-1].token_ids) == prompt


def test_the_sampling_fields_reach_the_engine(server: Server) -> None:
    before_s = time.monotonic()
    server.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"7": -100, "8": 2.5},
        seed=-3,
        stop_token_ids=[5],
        min_tokens=2,
        max_completion_tokens=9,
        priority=-2,
        cache_salt="tenant",
        tenant_share={"tenant": "t", "weight": 2.5},
        timeout_s=30,
    )
    request = server.service.requests[0]
    sampling = request.sampling
    eos = server.text.tokenizer.eos_token_ids[0]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
    assert penalties == (0.25, -0.5, 1.1)
    assert sampling.logit_bias == {7: -100.0, 8: 2.5}
    assert sampling.seed == choice_seed(-3, 0) >= 0
    assert (sampling.stop_token_ids, sampling.min_tokens, request.max_new_tokens) == ((5, eos), 2, 9)
    assert (request.priority, request.cache_salt, sampling.num_logprobs) == (-2, "tenant", None)
    assert (request.tenant, request.tenant_weight) == ("t", 2.5)
    assert request.deadline_s is not None
    assert before_s <= request.deadline_s - 30 <= time.monotonic()


def test_defaults(server: Server) -> None:
    server.chat()
    server.chat(top_k=-1, ignore_eos=True)
    first, second = server.service.requests
    assert first.max_new_tokens == 2048 - first.num_prompt
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (1.0, 1.0, 0)
    assert first.sampling.seed != second.sampling.seed
    assert second.sampling.stop_token_ids == ()


def test_a_tiny_temperature_is_greedy(server: Server) -> None:
    for temperature in (0, 1e-40, 1e-300):
        server.chat(temperature=temperature)
        assert server.service.requests[-1].sampling.temperature == 0


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
        ({"response_format": {"type": "regex", "regex": "a+"}}, GrammarSpec("regex", "a+")),
        ({"response_format": {"type": "grammar", "grammar": "root ::= x"}}, GrammarSpec("ebnf", "root ::= x")),
        ({"guided_json": {"type": "object"}}, GrammarSpec("json_schema", '{"type":"object"}')),
        ({"guided_json": '{"type": "object"}'}, GrammarSpec("json_schema", '{"type": "object"}')),
        ({"guided_regex": "b"}, GrammarSpec("regex", "b")),
        ({"guided_choice": ["a b", 'c"']}, GrammarSpec("ebnf", 'root ::= "a b" | "c\\""')),
        ({"structured_outputs": {"choice": ["x"]}}, GrammarSpec("ebnf", 'root ::= "x"')),
        ({"structured_outputs": {"json": {}}}, GrammarSpec("json_schema", "{}")),
        ({"response_format": {"type": "text"}}, None),
    ],
    ids=str,
)
def test_grammars(server: Server, fields: dict[str, Any], grammar: GrammarSpec | None) -> None:
    assert server.chat(**fields).status == 200
    assert server.service.requests[0].sampling.grammar == grammar


def test_stop_strings_in_a_stream(server: Server) -> None:
    server.say("one two three", chunk_tokens=5)
    for stops, text in ((["two"], "one "), ("e", "on"), (["zzz"], "one two three"), (["three!"], "one two three")):
        answer = joined(server.chat(stream=True, stop=stops).chunks)
        assert (answer["content"], answer["finish"]) == (text, "stop")
    kept = server.chat(stop="two", include_stop_str_in_output=True).json["choices"][0]
    assert kept["message"]["content"] == "one two"


def test_logprobs_of_a_stopped_stream_cover_what_was_sent(server: Server) -> None:
    server.say("one two three")
    chunks = server.chat(stream=True, stop="two", logprobs=True).chunks
    entries = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in entries) == "one "
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_logprobs_leave_out_reasoning_and_tool_calls(start_server: Callable[..., Server]) -> None:
    plain = start_server()
    plain.say(f"Look.\n{CALL}")
    called = plain.chat(logprobs=True, tools=TOOLS).json["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in called) == "Look."
    server = start_server(THINKING)
    server.say("Hm</think>Yes")
    content = server.chat(logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "Yes"


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("yyyz", ["yyyy"], "yyyz"),
        ("naïve ✓ 🦊 end", ["end"], "naïve ✓ 🦊 "),
        ("a </too b <tool c", ["zz"], "a </too b <tool c"),
        ("ab ab abc", ["abcd", "bb"], "ab ab abc"),
        ("✓✓✗", ["✓✗"], "✓"),
    ],
)
def test_logprobs_spell_the_content(
    server: Server, text: str, stop: list[str], content: str, chunk_tokens: int
) -> None:
    server.say(text, chunk_tokens=chunk_tokens)
    answer = server.chat(logprobs=True, stop=stop, tools=TOOLS).json["choices"][0]
    assert answer["message"]["content"] == content
    spelled = b"".join(bytes(entry["bytes"]) for entry in answer["logprobs"]["content"])
    assert spelled.decode() == content


def test_choices_of_a_stream_may_interleave_and_are_complete(server: Server) -> None:
    server.say(lambda request: f"choice {request.sampling.seed % 1000}", delay_s=0.001)
    chunks = server.chat(stream=True, n=4, seed=1, stream_options={"include_usage": True}).chunks
    texts = ["", "", "", ""]
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [f"choice {choice_seed(1, i) % 1000}" for i in range(4)]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == sum(len(text) + 1 for text in texts)
    assert usage["prompt_tokens"] == server.service.requests[0].num_prompt
    assert {choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]} == {None, "stop"}


def test_prompt_token_ids_replace_the_messages(server: Server) -> None:
    ids = server.text.tokenizer.encode("raw prompt")
    answer = server.chat(messages=..., prompt_token_ids=ids, return_token_ids=True).json
    assert server.service.requests[0].token_ids == ids
    assert answer["prompt_token_ids"] == ids
    assert server.text.tokenizer.decode(answer["choices"][0]["token_ids"]) == "Hello, world"


def test_reasoning_opened_by_prompt_token_ids_is_split_off(start_server: Callable[..., Server]) -> None:
    server = start_server(template=THINKING)
    server.say("hm, let me see</think>\n\nYes.")
    messages = [{"role": "user", "content": "?"}]
    ids = server.send("/tokenize", {"messages": messages}).json["tokens"]
    asked = server.chat(messages=messages).json["choices"][0]["message"]
    assert (asked["reasoning_content"], asked["content"]) == ("hm, let me see", "Yes.")
    assert server.chat(messages=..., prompt_token_ids=ids).json["choices"][0]["message"] == asked


def test_the_last_message_can_be_continued(server: Server) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two"}]
    assert server.chat(messages=messages, continue_final_message=True).status == 200
    assert server.text.tokenizer.decode(server.service.requests[0].token_ids).endswith("one two")


@pytest.mark.parametrize("begun", ["<", "end", "|>", "\n", "i"])
def test_a_continued_message_may_equal_the_text_that_the_template_adds_after_it(server: Server, begun: str) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": begun}]
    assert server.chat(messages=messages, continue_final_message=True).status == 200
    prompt = server.text.tokenizer.decode(server.service.requests[0].token_ids, skip_special_tokens=False)
    assert prompt.endswith(f"<|im_start|>assistant\n{begun.strip()}")


def test_special_tokens_are_kept_on_demand(server: Server) -> None:
    server.say("a<|im_start|>b")
    assert server.chat().json["choices"][0]["message"]["content"] == "ab"
    kept = server.chat(skip_special_tokens=False).json["choices"][0]["message"]["content"]
    assert kept == "a<|im_start|>b"


def test_cached_tokens_are_never_more_than_the_prompt(server: Server) -> None:
    server.say("x", cached_tokens=10_000)
    usage = server.chat().json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]


def test_tokenize_and_detokenize(server: Server) -> None:
    answer = server.send("/tokenize", {"prompt": "héllo", "return_token_strs": True}).json
    assert (answer["count"], answer["max_model_len"]) == (6, 2048)
    assert answer["token_strs"][0] == "h"
    assert server.send("/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": "héllo"}
    messages = [{"role": "user", "content": "hi"}]
    rendered = server.send("/tokenize", {"messages": messages, "tools": TOOLS}).json
    server.chat(messages=messages, tools=TOOLS)
    assert rendered["tokens"] == server.service.requests[0].token_ids


def test_a_forced_call_may_use_only_allowed_tools(server: Server) -> None:
    server.say(CALL)
    tools = [*TOOLS, {"type": "function", "function": {"name": "clock"}}]
    reference = [{"type": "function", "function": {"name": "weather"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": reference}}
    assert server.chat(tools=tools, tool_choice=choice).json["choices"][0]["finish_reason"] == "tool_calls"
    request = server.service.requests[0]
    assert "clock" not in request.sampling.grammar.text
    assert "clock" in server.text.tokenizer.decode(request.token_ids)


def test_a_call_cut_short_ends_with_length(server: Server) -> None:
    server.say(CALL)
    for cut in range(1, len(CALL)):
        forced = server.chat(tools=TOOLS, max_tokens=cut, tool_choice="required").json["choices"][0]
        assert (forced["finish_reason"], forced["message"]["content"] or "") == ("length", "")
    answer = server.chat(tools=TOOLS, max_tokens=60).json["choices"][0]
    assert answer["finish_reason"] == "length"


def test_without_parallel_calls_there_is_one(server: Server) -> None:
    server.say(f"{CALL}\n{CALL}")
    for stream in (False, True):
        answer = server.chat(tools=TOOLS, parallel_tool_calls=False, stream=stream)
        calls = joined(answer.chunks)["calls"] if stream else answer.json["choices"][0]["message"]["tool_calls"]
        assert len(calls) == 1
    assert len(server.chat(tools=TOOLS).json["choices"][0]["message"]["tool_calls"]) == 2
