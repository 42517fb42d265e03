"""Lines that agents put in front of their system prompt and change with every request.

Claude Code begins its system prompt with an `x-anthropic-billing-header:` line. It means nothing to a model, and because it
changes, no later block of the prompt could be found in a prefix cache. Such lines are left out of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

VOLATILE_LINES = ("x-anthropic-billing-header:",)  # how such lines begin


def without_volatile(text: str, prefixes: Sequence[str]) -> str:
    """Return the text without its leading lines that begin with one of `prefixes`. An empty prefix matches nothing."""
    starts = tuple(prefix for prefix in prefixes if prefix)
    begin = 0
    while text.startswith(starts, begin):  # without a copy for each line: there may be a million of them
        end = text.find("\n", begin)
        if end < 0:
            return ""
        begin = end + 1
        while text.startswith("\n", begin):
            begin += 1
    return text[begin:]


def volatile_pattern(prefixes: Sequence[str]) -> re.Pattern[bytes] | None:
    """Return a pattern that finds such a line in the JSON of a request body, up to the end of the line or of the string."""
    names = b"|".join(re.escape(prefix.encode()) for prefix in prefixes if prefix)
    return re.compile(rb'(?<=")(?:%b)(?:[^"\\]|\\[^n])*+(?:\\n)*' % names) if names else None
