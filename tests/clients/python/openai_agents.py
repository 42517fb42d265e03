"""The OpenAI Agents SDK (package openai-agents). The fourth argument is the API: chat or responses."""

from __future__ import annotations

import sys

import agents
from openai import AsyncOpenAI

url, model, num_turns, api = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
agents.set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel


@agents.function_tool
def read_file(path: str) -> str:
    """Read a file."""
    return f"A line of {path}. " * 40


agent = agents.Agent(
    name="reader", instructions="You read files. " * 20, tools=[read_file], model=kind(model, openai_client=client)
)
print(agents.Runner.run_sync(agent, "Read all files.", max_turns=num_turns + 2).final_output)
