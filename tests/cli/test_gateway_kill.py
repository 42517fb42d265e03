"""kill -9 of a real gateway under load: every answer that a client got has exactly one row, with the tokens it was sent."""

from __future__ import annotations

import http.client
import math
import random
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from scripted_server import Reply, ScriptedServer, Seen, answer
from test_gateway_cli import started

SEED = 20
NUM_CLIENTS = 4
BODY = '{"model":"scripted","stream":true,"messages":[{"role":"user","content":"hi"}]}'


def script(seen: Seen) -> Reply:
    return answer("one", " two", " three", " four", pause=0.003, prompt_tokens=10, cached_tokens=4)


@dataclass
class Clients:
    """Clients that ask without a pause until the gateway dies, or until `stop_s` on the monotonic clock."""

    url: str
    stop_s: float = math.inf
    pieces: dict[str, int] = field(default_factory=dict)  # words received, by request id
    complete: set[str] = field(default_factory=set)

    def run(self, name: str) -> None:
        number = 0
        while time.monotonic() < self.stop_s:
            request_id = f"{name}-{number}"
            number += 1
            connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
            try:
                headers = {"content-type": "application/json", "x-request-id": request_id}
                connection.request("POST", "/v1/chat/completions", BODY, headers)
                response = connection.getresponse()
                self.pieces[request_id] = 0
                while line := response.readline():
                    if b'"content"' in line and b'"content": ""' not in line:
                        self.pieces[request_id] += 1
                    if line.startswith(b"data: [DONE]"):
                        self.complete.add(request_id)
            except (OSError, http.client.HTTPException):
                return
            finally:
                connection.close()


def test_kill_9_loses_no_row_and_doubles_none(tmp_path: Path, server: ScriptedServer) -> None:
    server.script = script
    ledger = tmp_path / "usage.db"
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    expected: dict[str, int] = {}
    complete: set[str] = set()
    for number in range(3):
        with started(tmp_path, "--worker", f"{server.url},dialect=openai", "--store", str(ledger)) as running:
            clients = Clients(running.url)
            threads = [threading.Thread(target=clients.run, args=(f"k{number}c{one}",)) for one in range(NUM_CLIENTS)]
            for thread in threads:
                thread.start()
            time.sleep(rng.uniform(0.2, 0.6))
            running.process.kill()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
        expected |= clients.pieces
        complete |= clients.complete
    with started(tmp_path, "--worker", f"{server.url},dialect=openai", "--store", str(ledger)) as running:
        assert running.stop() == 0
    with closing(sqlite3.connect(ledger)) as connection:
        rows = list(connection.execute("SELECT x_request_id, status, prompt_tokens, completion_tokens FROM usage"))
    by_id = {row[0]: row[1:] for row in rows}
    assert len(by_id) == len(rows)
    assert len(complete) > NUM_CLIENTS
    for request_id in complete:
        status, prompt_tokens, completion_tokens = by_id[request_id]
        assert (status, prompt_tokens, completion_tokens) == (200, 10, 4)
    for request_id, num_pieces in expected.items():
        status, _, completion_tokens = by_id[request_id]
        assert status in (200, 599)
        assert num_pieces <= completion_tokens <= 4
