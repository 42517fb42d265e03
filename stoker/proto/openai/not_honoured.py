"""Fields of a client's API that this server accepts and does not act upon. Each answer names those of its request in a header."""

from __future__ import annotations

from typing import Any

from stoker.proto.openai.fields import GenerationFields

IGNORED_HEADER = "X-Ignored-Fields"

# By field: the values that ask for nothing, besides null. Every other value is named in the header.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "access_programs": ([],),
    "audio": (),
    "container": (),
    "context_management": ({}, []),
    "mcp_servers": ([],),
    "moderation": (),
    "prediction": (),
    "service_tier": ("auto", "default", "flex", "standard", "standard_only"),
    "speed": ("standard",),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_INCLUDED = frozenset({"message.output_text.logprobs", "reasoning.encrypted_content"})


def not_honoured(body: GenerationFields) -> list[str]:
    """Return the names of the fields of `body` that ask for something that this server does not do."""
    names = []
    for name, harmless in _HARMLESS.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            names.append(name)
    return names + _nested(body)


def _nested(body: GenerationFields) -> list[str]:
    names = []
    include = getattr(body, "include", None)
    if include and not _INCLUDED.issuperset(include):
        names.append("include")
    text = getattr(body, "text", None)
    if text is not None and text.verbosity not in (None, "medium"):
        names.append("text.verbosity")
    if getattr(getattr(body, "reasoning", None), "summary", None) is not None:
        names.append("reasoning.summary")
    if getattr(getattr(body, "thinking", None), "budget_tokens", None) is not None:
        names.append("thinking.budget_tokens")
    if getattr(body, "hosted_tools", None):
        names.append("tools")
    return names
