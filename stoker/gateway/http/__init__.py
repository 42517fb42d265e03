"""HTTP/1.1 server and client on asyncio protocols (uvloop in production), with back-pressure and limits.

The package does not depend on the rest of the gateway. All it knows about the OpenAI API is the shape of an error body.
"""

from stoker.gateway.http.body_budget import PUBLIC, BodyBudget
from stoker.gateway.http.connection_pool import ConnectionPool
from stoker.gateway.http.errors import (
    BadMessage,
    ConnectTimeout,
    NoSocketLeft,
    ResponseAborted,
    ResponseLost,
    ResponseTimeout,
    ResponseTooLarge,
    Unreachable,
    error_body,
)
from stoker.gateway.http.gate import BodyGrant, HeadRefusal, RequestGate
from stoker.gateway.http.head import HeaderFilter, Headers, RequestHead, end_to_end, header_block
from stoker.gateway.http.internal_request import AnswerSink, InternalRequest, internal_head
from stoker.gateway.http.limits import ClientLimits, ServerLimits
from stoker.gateway.http.open_connections import network_of
from stoker.gateway.http.origin import Origin
from stoker.gateway.http.request import HttpRequest
from stoker.gateway.http.server import Server
from stoker.gateway.http.worker_response import WorkerResponse

__all__ = [
    "PUBLIC",
    "AnswerSink",
    "BadMessage",
    "BodyBudget",
    "BodyGrant",
    "ClientLimits",
    "ConnectTimeout",
    "ConnectionPool",
    "HeadRefusal",
    "HeaderFilter",
    "Headers",
    "HttpRequest",
    "InternalRequest",
    "NoSocketLeft",
    "Origin",
    "RequestGate",
    "RequestHead",
    "ResponseAborted",
    "ResponseLost",
    "ResponseTimeout",
    "ResponseTooLarge",
    "Server",
    "ServerLimits",
    "Unreachable",
    "WorkerResponse",
    "end_to_end",
    "error_body",
    "header_block",
    "internal_head",
    "network_of",
]
