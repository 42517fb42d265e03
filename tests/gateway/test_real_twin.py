"""The live twin before real workers: one whose engine is stopped in bursts is named, and the other is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
from real_fleet import Process, RealFleet, real_fleet

WORDS = "river stone lamp garden signal copper winter orbit pepper violin"
STOPPED_S, RUNNING_S = 0.6, 0.4
WITHIN_S = 60.0


@contextmanager
def bursts(worker: Process) -> Iterator[None]:
    """Stop and continue a worker's engine again and again, as if its machine had other work."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            with suppress(OSError), worker.stopped(engine=True):
                time.sleep(STOPPED_S)
            time.sleep(RUNNING_S)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def clients(fleet: RealFleet, num_clients: int) -> Iterator[None]:
    """Let clients send new prompts of different lengths, one after another."""
    ended, numbers = threading.Event(), count()

    def run() -> None:
        while not ended.is_set():
            number = next(numbers)
            text = f"{number} " + WORDS * (1 + 7 * number % 12)
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True}
            fleet.ask(body).wait()
            time.sleep(0.2)

    threads = [threading.Thread(target=run) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def is_named(fleet: RealFleet, worker: Process) -> bool:
    return bool(fleet.gateway.metrics().get(f'stoker_gateway_worker_slow{{worker="127.0.0.1:{worker.port}"}}'))


@pytest.mark.slow
def test_a_worker_that_is_stopped_in_bursts_is_named_within_a_minute(tiny_folder: Path, tmp_path: Path) -> None:
    with real_fleet(tiny_folder, tmp_path, num_workers=3, gateway_options=("--twin",)) as fleet:
        slow, *others = fleet.workers
        with clients(fleet, 4):
            time.sleep(10.0)
            assert not any(is_named(fleet, worker) for worker in fleet.workers)
            with bursts(slow):
                began_s = time.monotonic()
                while not is_named(fleet, slow):
                    assert time.monotonic() < began_s + WITHIN_S, fleet.gateway.metrics()
                    time.sleep(0.5)
                assert not any(is_named(fleet, worker) for worker in others)
    assert '"worker_slow"' in (tmp_path / "gateway.log").read_text()
