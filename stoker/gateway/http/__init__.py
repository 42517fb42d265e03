"""A lean HTTP/1.1, both sides, on asyncio protocols (uvloop in production): bytes in, bytes out, back-pressure, limits.

It knows nothing of OpenAI but the shape of an error body, nothing of workers, routes or tokens.
"""

from stoker.gateway.http.answer import Answer
from stoker.gateway.http.client import Pool
from stoker.gateway.http.errors import (
    AnswerAborted,
    AnswerLate,
    AnswerLost,
    AnswerTooLarge,
    BadMessage,
    ConnectTimeout,
    NoSocketLeft,
    Unreachable,
    error_body,
)
from stoker.gateway.http.head import HeaderFilter, Headers, end_to_end, header_block
from stoker.gateway.http.limits import ClientLimits, ServerLimits
from stoker.gateway.http.origin import Origin
from stoker.gateway.http.request import Request
from stoker.gateway.http.server import Server

__all__ = [
    "Answer",
    "AnswerAborted",
    "AnswerLate",
    "AnswerLost",
    "AnswerTooLarge",
    "BadMessage",
    "ClientLimits",
    "ConnectTimeout",
    "HeaderFilter",
    "Headers",
    "NoSocketLeft",
    "Origin",
    "Pool",
    "Request",
    "Server",
    "ServerLimits",
    "Unreachable",
    "end_to_end",
    "error_body",
    "header_block",
]
