"""LangChain's agent (packages langchain, langchain-openai)."""

from __future__ import annotations

import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model = sys.argv[1], sys.argv[2]


@tool
def read_file(path: str) -> str:
    """Read a file."""
    return f"A line of {path}. " * 40


llm = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", streaming=True)
agent = create_agent(llm, [read_file], system_prompt="You read files. " * 20)
asked = {"messages": [{"role": "user", "content": "Read all files."}]}
print(agent.invoke(asked, {"recursion_limit": 100})["messages"][-1].content)
