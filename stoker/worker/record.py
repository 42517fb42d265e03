"""Times and token counts of one HTTP request, for its log line and the metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web

from stoker.sched.request import TokenUsage
from stoker.worker.draft_metrics import OutputKind
from stoker.worker.metrics import WorkerMetrics
from stoker.worker.open_work import AcceptedWork


@dataclass(slots=True, eq=False)
class RequestRecord:
    request_id: str
    endpoint: str
    metrics: WorkerMetrics
    started_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pulled_tokens: int = 0
    generated_tokens: int = 0
    work: AcceptedWork | None = None  # what gateways are told about it; None for requests that do not generate
    ignored_fields: Sequence[str] = ()  # of the request; named in a header of the answer
    _last_chunk_s: dict[int, float] = field(default_factory=dict)

    def saw_chunk(self, choice: int) -> None:
        now_s = time.monotonic()
        last_s = self._last_chunk_s.get(choice)
        self._last_chunk_s[choice] = now_s
        if last_s is not None:
            self.metrics.itl_s.observe(now_s - last_s)
        elif self.first_token_s is None:
            self.first_token_s = now_s
            if self.work is not None:
                self.work.first_token()
            self.metrics.ttft_s.observe(now_s - self.started_s)

    def count_tokens(self, usage: TokenUsage, num_resumed: int, with_prompt: bool, kind: OutputKind) -> None:
        """Add the tokens of a choice, without those that another worker generated and has counted."""
        num_generated = usage.completion_tokens - num_resumed
        self.generated_tokens += num_generated
        self.metrics.output_drafts.count(kind, num_generated, usage)
        if with_prompt:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
        self.pulled_tokens += usage.pulled_tokens

    def close(self, status: int) -> dict[str, object]:
        """Add the request to the metrics and return the fields of its log line."""
        elapsed_s = time.monotonic() - self.started_s
        self.metrics.requests.labels(self.endpoint, str(status)).inc()
        fields: dict[str, object] = {
            "request": self.request_id,
            "endpoint": self.endpoint,
            "status": status,
            "ms": round(elapsed_s * 1e3, 1),
        }
        if self.prompt_tokens:
            self.metrics.e2e_s(self.endpoint).observe(elapsed_s)
            self.metrics.prompt_tokens.inc(self.prompt_tokens)
            self.metrics.cached_tokens.inc(self.cached_tokens)
            self.metrics.generated_tokens.inc(self.generated_tokens)
            fields["prompt_tokens"] = self.prompt_tokens
            fields["cached_tokens"] = self.cached_tokens
            fields["generated_tokens"] = self.generated_tokens
        if self.pulled_tokens:
            fields["pulled_tokens"] = self.pulled_tokens
        if self.first_token_s is not None:
            fields["ttft_ms"] = round((self.first_token_s - self.started_s) * 1e3, 1)
        return fields


RECORD = web.RequestKey("record", RequestRecord)
