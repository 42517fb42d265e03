"""Cross-origin requests to the gateway. `proto/cors.py` has the rules."""

from __future__ import annotations

from stoker.gateway.api.reply import Headers, Reply
from stoker.gateway.http import RequestHead, header_block
from stoker.proto.cors import REQUESTED_HEADERS, REQUESTED_METHOD, CorsRules


def cors_pairs(rules: CorsRules, head: RequestHead) -> Headers:
    """Return the headers that let the page that sent this request read the answer."""
    return _encoded(rules.headers(_header(head, "origin"))) if rules else []


def cors_headers(rules: CorsRules, head: RequestHead) -> bytes:
    return header_block(cors_pairs(rules, head))


def preflight_reply(rules: CorsRules, head: RequestHead) -> Reply | None:
    """Return the answer to a browser's question whether it may send a request, or None if this is another request."""
    if head.method != b"OPTIONS" or _header(head, REQUESTED_METHOD) is None:
        return None
    origin = _header(head, "origin")
    asked = rules.preflight(origin, _header(head, REQUESTED_HEADERS) or "")
    always = rules.headers(origin)  # `HttpRequest.more_headers` has these already
    return Reply(204, _encoded({name: value for name, value in asked.items() if name not in always}), b"")


def _header(head: RequestHead, name: str) -> str | None:
    value = head.by_name.get(name.encode())
    return None if value is None else value.decode("latin-1")


def _encoded(headers: dict[str, str]) -> Headers:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
