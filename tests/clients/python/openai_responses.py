"""The openai package, Responses API, streamed, with strict validation of every response."""

from __future__ import annotations

import json
import sys

import openai

url, model, num_turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
parameters["additionalProperties"] = False
tool = {"type": "function", "name": "read_file", "description": "Read a file", "parameters": parameters, "strict": True}
items = [{"role": "user", "content": "Read all files."}]
for _ in range(num_turns + 1):
    fields = {"model": model, "instructions": "You read files. " * 20, "input": items, "tools": [tool], "store": False}
    with client.responses.stream(**fields) as stream:
        for _event in stream:
            pass
        response = stream.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
    if not calls:
        print(response.output_text)
        break
    for call in calls:
        output = f"A line of {json.loads(call.arguments)['path']}. " * 40
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
