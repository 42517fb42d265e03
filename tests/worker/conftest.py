from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import FakeService, byte_text
from http_server import Server, run_server

from stoker.worker.config import HttpConfig


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """`start_server(template=..., **HttpConfig's fields)`"""
    stops: list[Callable[[], None]] = []

    def start(template: str | None = None, **settings: Any) -> Server:
        text = byte_text(template)
        config = HttpConfig(**{"served_names": ("tiny", "tiny-alias"), **settings})
        server = Server(FakeService(text.tokenizer), text, config)
        stops.append(run_server(server))
        return server

    yield start
    for stop in stops:
        stop()


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    return start_server()


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A shared server for tests that do not change it."""
    text = byte_text()
    server = Server(FakeService(text.tokenizer), text, HttpConfig(served_names=("tiny", "tiny-alias")))
    stop = run_server(server)
    yield server
    stop()
