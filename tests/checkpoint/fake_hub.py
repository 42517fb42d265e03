"""A small Hugging Face Hub on localhost: enough of its HTTP API for the official client to download a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "org/name"
TAG = "v1.0"


@dataclass
class FakeHub:
    files: Mapping[str, bytes]
    refusal: tuple[int, str] | None = None  # HTTP status and the Hub's error code (X-Error-Code), for every request
    url: str = ""
    downloaded: list[str] = field(default_factory=list)

    def reply(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.refusal is not None:
            status, code = self.refusal
            return status, {"X-Error-Code": code} if code else {}, b'{"error": "refused"}'
        if path in (f"/api/models/{REPOSITORY}/revision/{name}" for name in ("main", TAG)):
            listed = [{"rfilename": name} for name in self.files]
            return 200, {}, json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": listed}).encode()
        if path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if path == f"/api/models/{REPOSITORY}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        name = path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")
        if name in self.files:
            data = self.files[name]
            return 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, data
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._reply(with_body=False)

        def do_GET(self) -> None:
            self._reply(with_body=True)

        def _reply(self, with_body: bool) -> None:
            status, headers, body = hub.reply(self.path.partition("?")[0])
            if with_body and "/resolve/" in self.path:
                hub.downloaded.append(self.path.rpartition("/")[2])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
