"""Workers share a Mooncake store whose master dies and returns under load: clients notice nothing."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from real_fleet import WORKER_OPTIONS, Exchange, Process, RealFleet, real_fleet
from worker.real import COMPLETIONS, wait_for

from stoker.kv.mooncake.master import INSTALL_HINT, MooncakeMaster, is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason=f"Mooncake is not installed: {INSTALL_HINT}")

BLOCK = 16
LOADED = "stoker_kv_loaded_tokens_total"
NUM_CLIENTS = 3
# The tiny model computes nearly as fast as the store reads, so mostly computing is chosen, and reading is retried every
# few seconds.
RECOVERS_S = 90.0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with MooncakeMaster(tmp_path / "master.log", lease_ms=200, client_ttl_s=4) as running:
        yield running


@pytest.fixture
def fleet(master: MooncakeMaster, tiny_folder: Path, tmp_path: Path) -> Iterator[RealFleet]:
    # Round robin, so only shared blocks are found. Memory for a few conversations, so most hits come from the store.
    options = ("--kv-mooncake", master.address, "--kv-mooncake-segment-gib", "0.06", "--kv-blocks", "160")
    by_turns = ("--policy", "round_robin")
    with real_fleet(tiny_folder, tmp_path, worker_options=options, gateway_options=by_turns) as fleet:
        fleet.reference = Process(["serve", str(tiny_folder), *WORKER_OPTIONS], tmp_path / "reference.log")
        try:
            fleet.reference.start(120)
            yield fleet
        finally:
            fleet.reference.stop()
    assert "Traceback" not in fleet.gateway.log_path.read_text()


def asked(prompt: list[int]) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def prompt_of(seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(100, 20_000) for _ in range(12 * BLOCK + seed % BLOCK)]


@dataclass
class Clients:
    """Send the same few prompts repeatedly until stopped."""

    port: int
    answers: list[tuple[int, Exchange]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Clients:
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        for turn in itertools.count():
            if self._stop.is_set():
                return
            seed = (number * 5 + turn) % 24
            exchange = Exchange(self.port, asked(prompt_of(seed)), path=COMPLETIONS)
            exchange.wait(60)
            self.answers.append((seed, exchange))


def loaded(fleet: RealFleet) -> float:
    return sum(worker.metrics()[LOADED] for worker in fleet.workers)


@pytest.mark.slow
def test_no_client_notices_a_master_that_dies_and_comes_back(fleet: RealFleet, master: MooncakeMaster) -> None:
    with Clients(fleet.gateway.port) as clients:
        wait_for(lambda: loaded(fleet) > 0, 60)
        master.kill()
        before = len(clients.answers)
        wait_for(lambda: len(clients.answers) >= before + 4 * NUM_CLIENTS, 60)
        master.start()
        was = loaded(fleet)
        wait_for(lambda: loaded(fleet) > was, RECOVERS_S)
    assert fleet.reference is not None
    right: dict[int, Any] = {}
    for seed, exchange in clients.answers:
        exchange.check()
        if seed not in right:
            alone = Exchange(fleet.reference.port, asked(prompt_of(seed)), path=COMPLETIONS)
            alone.wait(60)
            right[seed] = alone.json["choices"]
        assert exchange.json["choices"] == right[seed]
    fleet.settle(10)
