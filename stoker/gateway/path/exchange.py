"""One generating request from its arrival to its row: what the ledger, the log and the metrics will be told."""

from __future__ import annotations

import msgspec

from stoker.gateway.admission.api_keys import NOBODY, Caller
from stoker.gateway.api.client_body import Kind
from stoker.gateway.http import Request
from stoker.gateway.path.call import Call
from stoker.gateway.path.errors import code_of, reply_of
from stoker.gateway.path.rewrite import Usage
from stoker.gateway.records.tracing import RequestTrace
from stoker.gateway.records.usage_row import UsageRow
from stoker.proto.openai.errors import CLIENT_GONE_STATUS

_NO_USAGE = Usage()
_ENDPOINTS = {kind: kind.value for kind in Kind}  # an enum's value is found slowly


class Exchange(msgspec.Struct, eq=False):
    request: Request
    kind: Kind
    row_id: str  # ours: unique, whatever clients call their requests
    request_id: bytes  # the client's, or ours where it has none
    arrived_s: float
    time_s: float  # the same moment, since 1970
    trace: RequestTrace
    caller: Caller = NOBODY
    model: str = ""
    session: str | None = None
    call: Call | None = None
    is_admitted: bool = False
    queued_s: float = 0.0
    status: int = 0
    error: str | None = None

    def client_left(self) -> None:
        self.status, self.error = CLIENT_GONE_STATUS, "client_gone"

    def failed(self, error: BaseException) -> None:
        self.error = code_of(error)
        # In the middle of a stream the client has its status already; the error is what tells the two apart.
        if not self.request.started:
            self.status = reply_of(error).status

    def row(self, now: float) -> UsageRow:
        call, caller = self.call, self.caller
        usage = (call is not None and call.usage) or _NO_USAGE
        first_byte_s = call.first_byte_s if call is not None else None
        ttft_ms = None if first_byte_s is None else (first_byte_s - self.arrived_s) * 1e3
        e2e_ms, queued_ms = (now - self.arrived_s) * 1e3, self.queued_s * 1e3
        return UsageRow(  # by place: a struct with so many names takes six times as long to make
            self.row_id,
            self.time_s,
            caller.key_id,
            caller.tenant,
            self.model,
            self.session,
            (call and call.worker_id) or "",
            _ENDPOINTS[self.kind],
            self.status or (call.status if call is not None else 0),
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            ttft_ms,
            e2e_ms,
            call.num_resumes if call is not None else 0,
            call.policy if call is not None else "",
            queued_ms,
            self.error,
            self.request_id.decode(),
        )
