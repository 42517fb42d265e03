"""The anthropic package, streamed, with strict validation of every response and a cache mark that moves."""

from __future__ import annotations

import sys

import anthropic

url, model, num_turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True)
schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
tool = {"name": "read_file", "description": "Read a file", "input_schema": schema}
messages = [{"role": "user", "content": [{"type": "text", "text": "Read all files."}]}]
for turn in range(num_turns + 1):
    for message in messages:
        if message["role"] == "user":
            message["content"][-1].pop("cache_control", None)
    messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn};"}
    system = [line, {"type": "text", "text": "You read files. " * 20}]
    fields = {"model": model, "max_tokens": 500, "system": system, "messages": messages, "tools": [tool]}
    with client.messages.stream(**fields) as stream:
        answer = stream.get_final_message()
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        print(answer.content[0].text)
        break
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"A line of {call.input['path']}. " * 40}
        for call in calls
    ]
    messages.append({"role": "user", "content": results})
