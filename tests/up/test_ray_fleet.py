"""`stoker up` on a Ray cluster of three nodes and a head: a node is killed, answers continue, and the fleet gets its size back.

Slow: a Ray cluster starts in some ten seconds. Skipped without Ray. The nodes are processes of this machine with addresses of
their own (127.0.0.2 and so on).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from gateway.real_fleet import Exchange
from worker.real import is_alive, wait_for

pytest.importorskip("ray")

LONG_S = 180.0
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
small = {"object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
nodes = {}
for number in (2, 3, 4):
    nodes[number] = cluster.add_node(num_cpus=2, node_ip_address=f"127.0.0.{number}", **small)
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(int(line)), allow_graceful=False)
    print("killed", flush=True)
cluster.shutdown()
"""


@dataclass
class RayNodes:
    process: subprocess.Popen[str]
    address: str

    def kill(self, address: str) -> None:
        """Kill the processes of the node that has this address, with all that it runs."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(address.rpartition(".")[2], file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "killed\n"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    log = (tmp_path_factory.mktemp("ray") / "cluster.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )
    assert process.stdout is not None
    yield RayNodes(process, process.stdout.readline().strip())
    assert process.stdin is not None
    process.stdin.close()
    process.wait(LONG_S)
    process.stdout.close()
    log.close()


@dataclass
class RayFleet:
    process: subprocess.Popen[bytes]
    words: Path

    @property
    def url(self) -> str:
        found = re.search(r"gateway: ready at (http://\S+)", self.words.read_text())
        return found[1] if found else ""

    @property
    def hosts(self) -> list[str]:
        """The address of each worker, as often as one became ready."""
        return re.findall(r"unified-\d: ready at http://([\d.]+)", self.words.read_text())

    @property
    def num_restarts(self) -> int:
        return len(re.findall(r"unified-\d: restarting\n", self.words.read_text()))

    def ask(self) -> str:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            return str(json.loads(answer.read())["choices"][0]["text"])

    def answers(self) -> bool:
        try:
            return bool(self.ask())
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def fleet(tmp_path: Path, nodes: RayNodes, workers: str, gateway: str = "") -> Iterator[RayFleet]:
    file, words = tmp_path / "fleet.toml", tmp_path / "words"
    up = f'[up]\nplacement = "ray"\nray_address = "{nodes.address}"\n'
    file.write_text(f"[gateway]\nlisten = {{ port = 0 }}\n{gateway}\n{up}[[workers]]\n{workers}\n")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    with words.open("wb") as out:
        command = [sys.executable, "-m", "stoker.cli.main", "up", str(file)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            started = RayFleet(process, words)
            wait_for(lambda: "curl -s" in words.read_text() or process.poll() is not None, LONG_S)
            assert process.poll() is None, words.read_text()
            yield started
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(LONG_S)
    assert process.returncode == 0, words.read_text()


def serving(folder: Path) -> set[int]:
    """Return the processes that serve this model."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder).encode() in words and b"serve" in words:
            found.add(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fleet_survives_the_loss_of_a_node(nodes: RayNodes, tiny_folder: Path, tmp_path: Path) -> None:
    options = f'model = "{tiny_folder}"\ndevice = "cpu"\nthreads = 1\nkv_blocks = 200\ndtype = "float64"'
    with fleet(tmp_path, nodes, f"count = 2\n{options}") as two:
        wanted = two.ask()
        nodes.kill(two.hosts[0])
        until_s = time.monotonic() + LONG_S
        while len(two.hosts) < 3 and time.monotonic() < until_s:
            assert two.ask() == wanted  # the other worker answers
        assert two.num_restarts == 1
        assert two.hosts[2] != two.hosts[0]
        assert len(serving(tiny_folder)) == 2
        assert two.ask() == wanted
    assert not serving(tiny_folder)

    # One worker on the two nodes that are left: its ranks are a placement group.
    (tmp_path / "split").mkdir()
    with fleet(tmp_path / "split", nodes, f"tp = 2\npp = 2\nnodes = 2\n{options}") as split:
        assert split.ask() == wanted
        (pid, _) = serving(tiny_folder)
        os.kill(pid, signal.SIGKILL)  # of the head or of the other node: the whole worker starts again
        wait_for(lambda: len(split.hosts) == 2, LONG_S)
        wait_for(split.answers, LONG_S)
        assert split.ask() == wanted
        assert not is_alive(pid)
    assert not serving(tiny_folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_places_the_workers_that_the_autoscaler_wants(nodes: RayNodes, tiny_folder: Path, tmp_path: Path) -> None:
    options = f'model = "{tiny_folder}"\ndevice = "cpu"\nthreads = 1\nkv_blocks = 400'
    # Any running request is too much, so that a worker is wanted under load, and none without.
    scale = 'mode = "on", max_workers = 2, itl_s = 1e-6, ttft_s = 1000, interval_s = 0.2, hold_s = 1, reverse_s = 2, warm_s = 0'
    with fleet(tmp_path, nodes, f"max_count = 2\n{options}", f"autoscale = {{ {scale} }}") as scaled:
        assert len(scaled.hosts) == 1
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        running = Exchange(int(scaled.url.rpartition(":")[2]), body, path="/v1/completions")
        wait_for(lambda: len(scaled.hosts) == 2, LONG_S)
        assert len(serving(tiny_folder)) == 2
        running.leave()
        wait_for(lambda: len(serving(tiny_folder)) == 1, LONG_S)
        assert scaled.ask()
        assert scaled.num_restarts == 0
    assert not serving(tiny_folder)
