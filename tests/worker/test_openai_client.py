"""The official client, unmodified, against the worker on a real socket."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from http_server import Server

ASK: list[Any] = [{"role": "user", "content": "Say hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock"}},
]
FLAT_TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def test_chat(server: Server) -> None:
    server.say("Hello, wörld ✓", cached_tokens=16)
    answer = server.client().chat.completions.create(model="tiny", messages=ASK)
    assert answer.choices[0].message.content == "Hello, wörld ✓"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint


def test_chat_stream(server: Server) -> None:
    server.say("Hello, wörld ✓")
    chunks = list(
        server.client().chat.completions.create(
            model="tiny", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, wörld ✓"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len("Hello, wörld ✓".encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_named_tool_is_forced_by_grammar(server: Server) -> None:
    server.say(CALL)
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = server.client().chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, tool_choice=choice)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "stop"
    grammar = server.service.requests[0].sampling.grammar
    assert grammar.kind == "structural_tag"
    assert "weather" in grammar.text
    assert "clock" not in grammar.text


def test_a_required_tool_call(server: Server) -> None:
    server.say(CALL)
    answer = server.client().chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, tool_choice="required")
    assert answer.choices[0].finish_reason == "tool_calls"
    assert "clock" in server.service.requests[0].sampling.grammar.text


def test_tools_auto_streamed(server: Server) -> None:
    server.say(f"Let me look.\n{CALL}\n" + CALL.replace("Zürich", "Genève"))
    client = server.client()
    with client.chat.completions.stream(model="tiny", messages=ASK, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Let me look."
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
        {"city": "Zürich"},
        {"city": "Genève"},
    ]
    assert len({call.id for call in message.tool_calls}) == 2
    assert final.choices[0].finish_reason == "tool_calls"
    assert server.service.requests[0].sampling.grammar is None


def test_streamed_calls_have_openais_shape(server: Server) -> None:
    server.say(CALL)
    chunks = list(server.client().chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, stream=True))
    told = [chunk.choices[0].delta.tool_calls or [] for chunk in chunks]
    assert all(len(calls) <= 1 for calls in told), "some clients look at a chunk's first alone"
    deltas = [call for calls in told for call in calls]
    assert (deltas[0].id, deltas[0].type, deltas[0].function.name) == (deltas[0].id, "function", "weather")
    assert all(delta.id is None and delta.function.name is None and delta.index == 0 for delta in deltas[1:])
    assert json.loads("".join(delta.function.arguments for delta in deltas)) == {"city": "Zürich"}


def test_tool_choice_none_shows_the_model_no_tools(server: Server) -> None:
    server.say(CALL)
    answer = server.client().chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert "weather" not in server.text.tokenizer.decode(server.service.requests[0].token_ids)


def test_the_tool_result_is_in_the_next_prompt(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "snow"}]},
    ]
    server.client().chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    prompt = server.text.tokenizer.decode(server.service.requests[0].token_ids)
    assert "Bern" in prompt
    assert "snow" in prompt


def test_json_schema(server: Server) -> None:
    server.say('{"city": "Bern"}')
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS, "strict": True}}
    answer = server.client().chat.completions.create(model="tiny", messages=ASK, response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"city": "Bern"}
    grammar = server.service.requests[0].sampling.grammar
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.text) == PARAMETERS


def test_logprobs_line_up_with_the_content(server: Server) -> None:
    server.say("naïve")
    answer = server.client().chat.completions.create(model="tiny", messages=ASK, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "naïve"
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].bytes == entry.bytes for entry in entries)


def test_three_choices_have_three_seeds(server: Server) -> None:
    server.say(lambda request: f"seed {request.sampling.seed}")
    answer = server.client().chat.completions.create(model="tiny", messages=ASK, n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[0].message.content == "seed 7"
    assert len({choice.message.content for choice in answer.choices}) == 3
    again = server.client().chat.completions.create(model="tiny", messages=ASK, n=3, seed=7)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]
    texts = [len(choice.message.content) + 1 for choice in answer.choices]
    assert answer.usage.completion_tokens == sum(texts)
    assert answer.usage.prompt_tokens == server.service.requests[0].num_prompt


def test_a_stop_string_ends_the_sequence(server: Server) -> None:
    server.say("one two three four", endless=True)
    answer = server.client().chat.completions.create(model="tiny", messages=ASK, stop=["three", "zzz"])
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("one two three")
    assert len(server.service.cancelled) == 1


def test_models(server: Server) -> None:
    models = server.client().models.list().data
    assert [model.id for model in models] == ["tiny", "tiny-alias"]
    assert server.client().models.retrieve("tiny").max_model_len == 2048
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("other")


def test_completions(server: Server) -> None:
    server.say(lambda request: server.text.tokenizer.decode(request.token_ids).upper())
    client = server.client()
    answer = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, max_tokens=16, echo=True)
    assert [choice.text for choice in answer.choices] == ["abAB", "abAB", "cdCD", "cdCD"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 4
    ids = server.text.tokenizer.encode("xy")
    assert client.completions.create(model="tiny", prompt=ids).choices[0].text == "XY"
    assert [c.text for c in client.completions.create(model="tiny", prompt=[ids, ids]).choices] == ["XY", "XY"]
    streamed = client.completions.create(model="tiny", prompt="ef", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "EF"


def test_completion_logprobs(server: Server) -> None:
    server.say("hey")
    logprobs = server.client().completions.create(model="tiny", prompt="x", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["h", "e", "y"]
    assert logprobs.text_offset == [0, 1, 2]
    assert len(logprobs.token_logprobs) == 3
    assert set(logprobs.top_logprobs[0]) >= {"h"}


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_are_places_in_the_text(server: Server, stream: bool) -> None:
    server.say("🦊x é!")
    got = server.send("/v1/completions", {"prompt": "x", "logprobs": 1, "stream": stream})
    choices = [chunk["choices"][0] for chunk in got.chunks] if stream else got.json["choices"]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [token for one in logprobs for token in one["tokens"]] == [*"\ufffd\ufffd\ufffd\ufffdx \ufffd\ufffd!"]
    assert [offset for one in logprobs for offset in one["text_offset"]] == [0, 0, 0, 0, 1, 2, 3, 3, 4]


def test_responses(server: Server) -> None:
    server.say("Hello", cached_tokens=16)
    answer = server.client().responses.create(model="tiny", input="hi", instructions="Be brief")
    assert answer.output_text == "Hello"
    assert answer.status == "completed"
    assert answer.usage.input_tokens_details.cached_tokens == 16
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert "Be brief" in server.text.tokenizer.decode(server.service.requests[0].token_ids)


def test_a_response_that_was_cut_off_is_incomplete(server: Server) -> None:
    answer = server.client().responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text == "Hel"


def test_responses_with_tools_and_their_results(server: Server) -> None:
    server.say(CALL)
    client = server.client()
    answer = client.responses.create(model="tiny", input="hi", tools=FLAT_TOOLS, tool_choice="required")
    call = answer.output[0]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Zürich"})
    assert server.service.requests[0].sampling.grammar is not None
    conversation: Any = [
        {"role": "user", "content": "hi"},
        *[item.model_dump(exclude_none=True) for item in answer.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "snow"},
    ]
    server.say("It snows.")
    assert client.responses.create(model="tiny", input=conversation, tools=FLAT_TOOLS).output_text == "It snows."
    assert "snow" in server.text.tokenizer.decode(server.service.requests[1].token_ids)


def test_responses_stream_in_the_official_order(server: Server) -> None:
    server.say(f"Look.\n{CALL}", chunk_tokens=4)
    events = list(server.client().responses.create(model="tiny", input="hi", tools=FLAT_TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert order == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert events[0].response.output == []
    assert events[0].response.status == "in_progress"
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1]
    assert added[0].item.content == []
    final = events[-1].response
    assert final.output_text == "Look."
    assert json.loads(final.output[1].arguments) == {"city": "Zürich"}
    assert final.usage.output_tokens > 0


def test_the_responses_stream_helper(server: Server) -> None:
    server.say("Hello, wörld")
    with server.client().responses.stream(model="tiny", input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "Hello, wörld"


def test_errors_have_the_clients_exception_classes(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=ASK)
    assert missing.value.code == "model_not_found"
    server.say(overloaded=True)
    with pytest.raises(openai.InternalServerError) as busy:
        client.chat.completions.create(model="tiny", messages=ASK)
    assert busy.value.status_code == 503
    server.say(dies_after=3)
    with pytest.raises(openai.APIError, match="engine process ended"):
        list(client.chat.completions.create(model="tiny", messages=ASK, stream=True))
