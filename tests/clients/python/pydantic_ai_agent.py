"""pydantic-ai (package pydantic-ai-slim[openai,anthropic]). The fourth argument is the API: chat, responses or messages."""

from __future__ import annotations

import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, model, api = sys.argv[1], sys.argv[2], sys.argv[4]
openai_provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
models = {
    "chat": lambda: OpenAIChatModel(model, provider=openai_provider),
    "responses": lambda: OpenAIResponsesModel(model, provider=openai_provider),
    "messages": lambda: AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="none")),
}
agent = Agent(models[api](), system_prompt="You read files. " * 20)


@agent.tool_plain
def read_file(path: str) -> str:
    """Read a file."""
    return f"A line of {path}. " * 40


print(agent.run_sync("Read all files.").output)
