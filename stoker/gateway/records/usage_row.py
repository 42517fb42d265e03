"""What is written down about one request when it ends: for the bill, the log and the metrics alike."""

from __future__ import annotations

import msgspec


class UsageRow(msgspec.Struct, frozen=True, gc=False):
    """A struct because it goes out of the process as it is, and because making one is on every request's path."""

    request_id: str  # the gateway's own: unique, never what a client chose
    time_s: float  # arrival, seconds since 1970
    key_id: str
    tenant: str
    model: str
    session: str | None
    worker: str  # empty: no worker had it
    endpoint: str  # chat, completions, responses
    status: int  # 499: the client left
    prompt_tokens: int
    cached_tokens: int  # of these, found in cache by whoever computed the prompt
    completion_tokens: int
    ttft_ms: float | None
    e2e_ms: float
    resumed: int = 0  # times that another worker took over
    policy: str = ""
    queued_ms: float = 0.0
    error: str | None = None  # the error's code
    x_request_id: str = ""  # what client and workers call it; a client may have chosen it
