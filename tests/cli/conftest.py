from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import ScriptedServer, running

from stoker.loadgen.datasets import DATA_DIRS


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with running(ScriptedServer()) as started:
        yield started


@pytest.fixture(scope="session")
def data_dir() -> Path:
    root = Path(__file__).parents[2]
    for folder in DATA_DIRS:
        if (root / folder).is_dir():
            return root / folder
    pytest.skip("the public data sets are not here")


@pytest.fixture
def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
