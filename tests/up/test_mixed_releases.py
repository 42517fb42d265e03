"""Real gateways and workers of the previous release (0.1.0) beside those of this version, as in the middle of an upgrade.

The previous release is read from the history of the repository. Skipped where that is missing, as in a shallow clone.
`tests/proto/test_previous_release.py` has its recorded messages.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from gateway.real_fleet import ADMIN_TOKEN, WORKER_OPTIONS, Exchange, Process
from worker.real import COMPLETIONS, wait_for

ROOT = Path(__file__).parents[2]
PREVIOUS = "5c60a8bccb2edb9dc2f47f72aeccd77d5ae2fdc2"  # the last commit of 0.1.0, before requests could move
NEW, OLD = "this version", "the previous release"
BODY = {"model": "tiny", "prompt": "Once upon a time there was " * 20, "max_tokens": 48, "temperature": 0}
# Prefill workers compute every prompt, also a short one.
GATEWAY_FILE = "[routing]\nlocal_prefill_tokens = 0\nlocal_prefill_share = 1000.0\n"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment in which the commands of the previous release run."""
    source = tmp_path_factory.mktemp("previous")
    archive = subprocess.run(["git", "archive", PREVIOUS, "stoker"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip("the history of the repository has no commit of the previous release")
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
    return {"PYTHONPATH": str(source)}


@dataclass
class MixedFleet:
    gateway: Process
    workers: list[Process]

    def ask(self, **more: object) -> Exchange:
        return Exchange(self.gateway.port, {**BODY, **more}, path=COMPLETIONS)

    def fleet(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = self.gateway.get("/admin/fleet", ADMIN_TOKEN)["workers"]
        return found


@contextmanager
def mixed(
    folder: Path, model: Path, previous: dict[str, str], gateway: str, workers: Sequence[tuple[str, str]]
) -> Iterator[MixedFleet]:
    """Run a gateway of one release before workers of any release, each with a role."""
    (folder / "secret").write_text("the secret of a fleet of two releases")
    (folder / "admin").write_text(ADMIN_TOKEN)
    (folder / "gateway.toml").write_text(GATEWAY_FILE)
    secret = ["--secret-file", str(folder / "secret")]
    environs = {NEW: {}, OLD: previous}
    started: list[Process] = []
    try:
        for number, (release, role) in enumerate(workers):
            options = ["serve", str(model), *WORKER_OPTIONS, *secret, "--role", role]
            worker = Process(options, folder / f"worker-{number}.log", environ=environs[release])
            started.append(worker)
            worker.start()
        options = ["gateway", "--store", "none", "--config", str(folder / "gateway.toml"), *secret]
        options += ["--admin-token-file", str(folder / "admin")]
        for (_, role), worker in zip(workers, started, strict=True):
            options += ["--worker", f"{worker.url},role={role}"]
        front = Process(options, folder / "gateway.log", environ=environs[gateway])
        fleet = MixedFleet(front, list(started))
        started.append(front)
        front.start()
        wait_for(lambda: all(one["usable"] and one["models"] for one in fleet.fleet()), 120)
        yield fleet
    finally:
        for process in reversed(started):
            process.stop()


def text_of(exchange: Exchange) -> str:
    exchange.wait()
    assert (exchange.status, exchange.broken) == (200, ""), exchange.answer
    if not exchange.body.get("stream"):
        return str(json.loads(exchange.answer)["choices"][0]["text"])
    assert exchange.events[-1] == "[DONE]", exchange.events[-1]
    chunks = [json.loads(event) for event in exchange.events[:-1]]
    assert not [one for one in chunks if "error" in one]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> str:
    worker = Process(["serve", str(tiny_folder), *WORKER_OPTIONS], tmp_path_factory.mktemp("alone") / "worker.log")
    worker.start()
    try:
        return text_of(Exchange(worker.port, BODY, path=COMPLETIONS))
    finally:
        worker.stop()


@pytest.mark.parametrize(
    ("gateway", "workers"),
    [
        pytest.param(NEW, [(OLD, "unified"), (NEW, "unified")], id="workers-are-upgraded"),
        pytest.param(OLD, [(NEW, "unified"), (OLD, "unified")], id="gateway-is-old"),
        pytest.param(NEW, [(OLD, "prefill"), (NEW, "decode")], id="old-prefill-new-decode"),
        pytest.param(NEW, [(NEW, "prefill"), (OLD, "decode")], id="new-prefill-old-decode"),
        pytest.param(OLD, [(NEW, "prefill"), (NEW, "decode")], id="old-gateway-new-pair"),
    ],
)
def test_two_releases_serve_one_fleet(
    gateway: str,
    workers: list[tuple[str, str]],
    previous: dict[str, str],
    tiny_folder: Path,
    tmp_path: Path,
    expected: str,
) -> None:
    with mixed(tmp_path, tiny_folder, previous, gateway, workers) as fleet:
        for _ in range(2):  # the second round finds its prompt in a cache
            asked = [fleet.ask(stream=number % 2 == 0, user=f"u-{number}") for number in range(6)]
            assert {text_of(one) for one in asked} == {expected}
        last = fleet.ask()
        assert text_of(last) == expected
        assert last.usage["prompt_tokens_details"]["cached_tokens"] > 0
        assert all(one["usable"] for one in fleet.fleet())


def test_a_worker_of_the_previous_release_is_drained_and_finishes_its_requests(
    previous: dict[str, str], tiny_folder: Path, tmp_path: Path, expected: str
) -> None:
    """It cannot move its requests. That is no error: the drain waits, and new requests go to the other worker."""
    with mixed(tmp_path, tiny_folder, previous, NEW, [(OLD, "unified"), (NEW, "unified")]) as fleet:
        asked = [fleet.ask(stream=True, user=f"u-{number}") for number in range(8)]
        old = fleet.workers[0].url.removeprefix("http://")
        drained = Exchange(
            fleet.gateway.port, {}, {"Authorization": f"Bearer {ADMIN_TOKEN}"}, f"/admin/drain?worker={old}&move=1"
        )
        drained.wait()
        assert drained.status == 200, drained.answer
        assert {text_of(one) for one in asked} == {expected}
        assert text_of(fleet.ask()) == expected
        assert {one["worker"]: one["draining"] for one in fleet.fleet()}[old]
