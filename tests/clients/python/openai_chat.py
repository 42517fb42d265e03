"""The openai package, chat completions, streamed, with strict validation of every response."""

from __future__ import annotations

import sys

import openai

url, model, num_turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
tool = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
messages = [{"role": "system", "content": "You read files. " * 20}, {"role": "user", "content": "Read all files."}]
for _ in range(num_turns + 1):
    with client.chat.completions.stream(model=model, messages=messages, tools=[tool]) as stream:
        for _event in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
    if not message.tool_calls:
        print(message.content)
        break
    for call in message.tool_calls:
        content = f"A line of {call.function.parsed_arguments['path']}. " * 40
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
