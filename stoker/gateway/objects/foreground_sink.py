"""The way of a stored response's answer to the client that waits for it."""

from __future__ import annotations

from stoker.gateway.http import Headers, HttpRequest, InternalRequest
from stoker.gateway.objects.response_events import EditedStream, ResponseEdits


class ForegroundSink:
    """Passes an answer on to the client, and keeps its end back until it is stored."""

    def __init__(self, client: HttpRequest, edits: ResponseEdits) -> None:
        self._client = client
        self._edits = edits
        self.stream = EditedStream(edits)
        self.headers: Headers = []
        self.response: bytes | None = None

    @property
    def paused(self) -> bool:
        return self._client.paused

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        if status != 200:
            self._client.respond(status, headers, body)
            return
        self.headers = headers
        self.response = self._edits.whole(body)

    def start(self, status: int, headers: Headers) -> None:
        self._client.start(status, headers)

    def write(self, data: bytes) -> None:
        self._client.write(b"".join(self.stream.push(data)))

    def finish(self) -> None:
        self.response = self.stream.response

    def deliver(self, response: bytes | None) -> None:
        """Send what was kept back. `response` is the stored object, which may differ in whether it was stored."""
        client = self._client
        if client.finished or client.gone:
            return
        if not client.started:
            if response is not None:
                client.respond(200, self.headers, response)
            return
        if response is not None and response != self.stream.response:
            client.write(self.stream.last_event.replace(b'"store":true', b'"store":false', 1))
        else:
            client.write(self.stream.last_event)
        client.finish()


def connect(client: HttpRequest, request: InternalRequest) -> None:
    """Pass the client's events on to the internal request that serves it."""

    def pause() -> None:
        if request.on_pause is not None:
            request.on_pause()

    def resume() -> None:
        if request.on_resume is not None:
            request.on_resume()

    client.on_gone, client.on_pause, client.on_resume = request.lose, pause, resume
