"""A Ray cluster for tests, and `stoker up` on it.

The nodes are processes of this machine with addresses of their own (127.0.0.2 and so on).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from worker.real import wait_for

LONG_S = 180.0
CLUSTER = """
import json
import sys
from ray.cluster_utils import Cluster
small = {"object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
nodes = {}
for number, resources in json.loads(sys.argv[1]).items():
    nodes[int(number)] = cluster.add_node(
        num_cpus=int(sys.argv[2]), resources=resources, node_ip_address=f"127.0.0.{number}", **small
    )
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(int(line)), allow_graceful=False)
    print("killed", flush=True)
cluster.shutdown()
"""


class RayCluster(Protocol):
    address: str
    listen: str  # of gateways, by default

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` where `stoker up` is."""


@dataclass
class RayNodes:
    process: subprocess.Popen[str]
    address: str
    listen: str = "port = 0"

    def inside(self, *command: str) -> list[str]:
        return list(command)

    def kill(self, address: str) -> None:
        """Kill the processes of the node that has this address, with all that it runs."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(address.rpartition(".")[2], file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "killed\n"


@contextmanager
def ray_nodes(folder: Path, resources: Mapping[int, Mapping[str, float]], num_cpus: int = 2) -> Iterator[RayNodes]:
    """Run a cluster. `resources` has the custom resources of each node, by the last number of its address."""
    command = [sys.executable, "-c", CLUSTER, json.dumps(resources), str(num_cpus)]
    with (folder / "cluster.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield RayNodes(process, process.stdout.readline().strip())
        finally:
            process.stdin.close()
            process.wait(LONG_S)
            process.stdout.close()


@dataclass
class RayFleet:
    process: subprocess.Popen[bytes]
    words: Path
    state_home: Path
    headers: dict[str, str] = field(default_factory=dict)  # of each request

    @property
    def url(self) -> str:
        """The newest address of the first gateway."""
        found = self.addresses(r"gateway(?:-0)?")
        return found[-1] if found else ""

    def addresses(self, name: str) -> list[str]:
        """The addresses at which the part became ready, one after the other."""
        return re.findall(rf"{name}: ready at (\S+)", self.words.read_text())

    def state(self) -> Any:
        (path,) = (self.state_home / "stoker" / "fleets").glob("*/state.json")
        return json.loads(path.read_text())

    def part(self, name: str) -> Any:
        return next(part for part in self.state()["parts"] if part["name"] == name)

    def log(self, name: str) -> str:
        return Path(self.part(name)["log"]).read_text()

    @property
    def hosts(self) -> list[str]:
        """The address of each worker, as often as one became ready."""
        return re.findall(r"unified-\d: ready at http://([\d.]+)", self.words.read_text())

    @property
    def num_restarts(self) -> int:
        return len(re.findall(r"unified-\d: restarting\n", self.words.read_text()))

    def ask(self, url: str = "") -> str:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(f"{url or self.url}/v1/completions", json.dumps(body).encode())
        for name, value in {"Content-Type": "application/json", **self.headers}.items():
            request.add_header(name, value)
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            return str(json.loads(answer.read())["choices"][0]["text"])

    def answers(self) -> bool:
        try:
            return bool(self.ask())
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def launched(
    tmp_path: Path, nodes: RayCluster, workers: str, gateway: str = "", up: str = "", listen: str = ""
) -> Iterator[RayFleet]:
    """Start `stoker up`, and stop it in order. The texts are added to the tables of its file; `up` may begin further tables."""
    file, words = tmp_path / "fleet.toml", tmp_path / "words"
    up = f'[up]\nplacement = "ray"\nray_address = "{nodes.address}"\n{up}\n'
    file.write_text(f"[gateway]\nlisten = {{ {listen or nodes.listen} }}\n{gateway}\n{up}[[workers]]\n{workers}\n")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    with words.open("wb") as out:
        command = nodes.inside(sys.executable, "-m", "stoker.cli.main", "up", str(file))
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            yield RayFleet(process, words, tmp_path / "state")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(LONG_S)


@contextmanager
def fleet(tmp_path: Path, nodes: RayCluster, workers: str, gateway: str = "", up: str = "") -> Iterator[RayFleet]:
    """Run a fleet that is ready. It must end with code 0."""
    with launched(tmp_path, nodes, workers, gateway, up) as started:
        process, words = started.process, started.words
        wait_for(lambda: "curl -s" in words.read_text() or process.poll() is not None, LONG_S)
        assert process.poll() is None, words.read_text()
        yield started
    assert process.returncode == 0, words.read_text()


def serving(folder: Path) -> set[int]:
    """Return the processes that serve this model."""
    return {pid for pid, words in commands().items() if str(folder) in words and "serve" in words}


def commands() -> dict[int, list[str]]:
    """Return the command lines of all processes of this machine."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found[int(path.parent.name)] = path.read_bytes().decode(errors="replace").split("\0")
    return found
