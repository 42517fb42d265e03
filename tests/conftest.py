"""What all tests share: the import path of helpers, optional data, and the real small model."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.postgres_server import PostgresServer, installed

# Before torch is loaded: OpenMP threads that spin at barriers make a busy machine ten times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything from a hub

# A shell that starts this in the background ignores SIGINT, and children inherit that. The Ctrl-C tests need the
# default.
signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))

# Folders whose files take seconds. They run last, so that all processes of a run end at about the same time.
SHORT = {"autoscale", "base", "fleet", "fuzz", "proto", "replay", "routing", "sched", "scripted", "spec", "text"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.relative_to(Path(__file__).parent).parts[0] in SHORT)


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """A test that runs a command in this process must not change logging for the others."""
    logger = logging.getLogger("stoker")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = handlers, level, propagate


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, downloaded once, as `stoker serve` does it."""
    from stoker.checkpoint.progress import silent
    from stoker.checkpoint.source import default_cache_dir, resolve_model

    return resolve_model(None, default_cache_dir(os.environ), silent).path


@pytest.fixture(scope="session")
def tiny_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that starts in seconds, with SmolLM2's tokenizer."""
    from worker.real import make_tiny_folder

    return make_tiny_folder(tmp_path_factory.mktemp("model") / "tiny", smollm2)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server for this session of tests; skipped if none is installed."""
    programs = installed()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed (Debian, as root: apt-get install postgresql)")
    server = PostgresServer(programs)
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """The URL of a new database."""
    return postgres_server.create_database(f"t{secrets.token_hex(6)}")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Public prompt sets and traces that are not part of the repository; tests that need them are skipped without them."""
    for folder in (Path("data"), Path(__file__).parents[2] / "shared" / "data"):
        if (folder / "prompts").is_dir():
            return folder
    pytest.skip("the prompt sets are not here")
