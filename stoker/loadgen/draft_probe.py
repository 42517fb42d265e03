"""How many drafts a running worker verifies in a step, and how many of them it accepts: from its metrics, over its traffic."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite

from stoker.base.errors import ConfigError
from stoker.loadgen.client import ServerUnreachable

_LINE = re.compile(r"stoker_output_(tokens|draft_tokens|accepted_draft_tokens)_total\{[^}]*\} (\S+)")
_MIN_TOKENS = 200  # fewer say little about the acceptance
_TIMEOUT_S = 30.0
_MAX_ACCEPTANCE = 0.999


@dataclass(frozen=True, slots=True)
class DraftRates:
    """Each step verifies `drafts` tokens of a row; each is accepted with `acceptance`, if those before it were."""

    drafts: int
    acceptance: float


async def probe_drafts(url: str) -> DraftRates:
    """Return the rates of a worker's finished answers. Raise ConfigError if it has answered too little."""
    import aiohttp

    where = f"{url.rstrip('/').removesuffix('/v1')}/metrics"
    try:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(where) as response:
            text, status = await response.text(), response.status
    except (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError) as lost:
        raise ServerUnreachable(f"--drafts-from {url}: no worker answers at {where}: {lost}") from lost
    if status != 200:
        raise ServerUnreachable(f"--drafts-from {url}: {where} answered {status}")
    return draft_rates(text, url)


def draft_rates(metrics: str, url: str) -> DraftRates:
    """Return the rates from a worker's metrics page."""
    counts = {"tokens": 0.0, "draft_tokens": 0.0, "accepted_draft_tokens": 0.0}
    for name, value in _LINE.findall(metrics):
        counts[name] += _number(value)
    tokens, drafted, accepted = counts.values()
    if tokens < _MIN_TOKENS:
        raise ConfigError(
            f"--drafts-from {url}: the worker has generated {tokens:g} tokens; at least {_MIN_TOKENS} of its usual traffic "
            "are needed"
        )
    # A row's step gives its accepted drafts and one more token.
    num_steps = max(1.0, tokens - accepted)
    if not drafted:
        return DraftRates(0, 0.0)
    drafts = max(1, round(drafted / num_steps))
    return DraftRates(drafts, _acceptance(drafts, accepted / num_steps))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if isfinite(value) and value >= 0 else 0.0


def _acceptance(drafts: int, accepted: float) -> float:
    """Return the chance p of one draft, so that p + p^2 + ... + p^drafts are the accepted drafts of a step."""
    low, high = 0.0, _MAX_ACCEPTANCE
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**number for number in range(1, drafts + 1)) < accepted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
