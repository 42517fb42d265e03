"""`GET /ui`: the dashboard's files. They hold no data, so they need no token: the page reads everything from the admin API.

The files are read once, when the gateway starts, and only these can be requested: no path is ever opened.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from stoker.base.errors import NotFound
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Headers, Reply, method_not_allowed

STATIC_DIR = Path(__file__).parent / "static"
_PREFIX = "/ui/"
_INDEX = "index.html"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# The page runs only its own files, and talks only to this gateway.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
    b" base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAFETY: Headers = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
]
_READING = frozenset({b"GET", b"HEAD"})


@dataclass(frozen=True, slots=True)
class StaticFile:
    content_type: bytes
    etag: bytes
    data: bytes


class StaticPages:
    """Serves the files of a folder below /ui."""

    def __init__(self, folder: Path = STATIC_DIR) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): _read(path)
            for path in sorted(folder.rglob("*"))
            if path.suffix in _TYPES and path.is_file()
        }

    async def answer(self, request: EndpointRequest) -> Reply:
        if request.method not in _READING:
            return method_not_allowed(request.path, request.method, [b"GET"])
        path = request.path.decode("latin-1")
        if path == _PREFIX.rstrip("/"):
            return Reply(308, [(b"location", _PREFIX.encode()), *_SAFETY], b"")
        found = self._files.get(path.removeprefix(_PREFIX) or _INDEX)
        if found is None:
            raise NotFound(f"No such path: {path}.", code="unknown_url")
        headers = [(b"etag", found.etag), *_SAFETY]
        if request.header(b"if-none-match") == found.etag:
            return Reply(304, headers, b"")
        return Reply(200, [(b"content-type", found.content_type), *headers], found.data)


def _read(path: Path) -> StaticFile:
    data = path.read_bytes()
    return StaticFile(_TYPES[path.suffix], b'"%b"' % hashlib.sha256(data).hexdigest()[:32].encode(), data)
