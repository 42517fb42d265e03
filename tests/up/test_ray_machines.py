"""`stoker up` on a Ray cluster of machines with addresses of their own: the head is lost and comes back, then a node is lost.

Slow: it starts a Ray cluster. It needs root, `ip`, Redis and Ray. Without Redis, a Ray cluster does not survive its head.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from net_machines import HERE, Machine, network
from worker.real import wait_for

from tests.up.ray_cluster import LONG_S, RayFleet, fleet, serving

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="Redis is not installed"),
]
SUBNET, REDIS_PORT, RAY_PORT = "10.231.8", 6390, 6379
OUTAGE_S = 15.0
# A folder of its own at /tmp/ray, since the machines share their files.
OWN_FOLDER = 'mkdir -p /tmp/ray && mount --bind "$0" /tmp/ray && exec "$@"'


@dataclass
class RayMachines:
    """A head, and nodes that run parts. `stoker up` is on the first node; the others have the resource `front`."""

    machines: list[Machine]
    folder: Path
    listen: str = 'host = "0.0.0.0", port = 0'

    @property
    def address(self) -> str:
        return f"{self.machines[0].address}:{RAY_PORT}"

    def inside(self, *command: str) -> list[str]:
        return self._on(self.machines[1], *command)

    def start_head(self) -> None:
        self._ray(self.machines[0], 0, "--head", "--port", str(RAY_PORT), "--include-dashboard=false")

    def start_nodes(self) -> None:
        for number, machine in enumerate(self.machines[1:]):
            resources = json.dumps({"front": 1} if number else {})
            self._ray(machine, 2, "--address", self.address, "--resources", resources)

    def kill_head(self) -> None:
        """Its disk is lost, too."""
        self.machines[0].kill()
        shutil.rmtree(self._folder_of(self.machines[0]))

    def _ray(self, machine: Machine, num_cpus: int, *options: str) -> None:
        command = [str(Path(sys.executable).with_name("ray")), "start", *options]
        command += ["--node-ip-address", machine.address, "--num-cpus", str(num_cpus)]
        command += ["--object-store-memory", str(80 << 20), "--disable-usage-stats"]
        environment = dict(os.environ)
        if "--head" in options:
            environment["RAY_REDIS_ADDRESS"] = f"{SUBNET}.{HERE}:{REDIS_PORT}"
        started = subprocess.run(
            self._on(machine, *command), env=environment, capture_output=True, text=True, timeout=LONG_S
        )
        assert started.returncode == 0, started.stdout + started.stderr

    def _on(self, machine: Machine, *command: str) -> list[str]:
        folder = self._folder_of(machine)
        folder.mkdir(exist_ok=True)
        return machine.inside("unshare", "--mount", "sh", "-c", OWN_FOLDER, str(folder), *command)

    def _folder_of(self, machine: Machine) -> Path:
        return self.folder / machine.address


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayMachines]:
    with network(SUBNET, 4) as machines:
        here = f"{SUBNET}.{HERE}"
        options = ["--bind", here, "--port", str(REDIS_PORT), "--protected-mode", "no", "--save", ""]
        redis = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL, cwd=tmp_path)
        try:
            wait_for(lambda: _answers(here, REDIS_PORT), LONG_S)
            started = RayMachines(machines, tmp_path)
            started.start_head()
            started.start_nodes()
            yield started
        finally:
            redis.terminate()
            redis.wait(LONG_S)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def keeps_answering(placed: RayFleet, wanted: str, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        assert placed.ask() == wanted
        time.sleep(0.1)


def test_a_fleet_survives_the_head_and_a_node(cluster: RayMachines, tiny_folder: Path, tmp_path: Path) -> None:
    options = f'model = "{tiny_folder}"\ndevice = "cpu"\nthreads = 1\nkv_blocks = 200\ndtype = "float64"\ncount = 2'
    with fleet(tmp_path, cluster, options) as placed:
        assert placed.url.startswith(f"http://{cluster.machines[1].address}:")
        wanted = placed.ask()
        pids = serving(tiny_folder)

        cluster.kill_head()
        keeps_answering(placed, wanted, OUTAGE_S)
        cluster.start_head()
        keeps_answering(placed, wanted, OUTAGE_S)
        assert serving(tiny_folder) == pids

        hosts = {one.address: one for one in cluster.machines[2:]}
        lost = next(host for host in placed.hosts if host in hosts)  # not where `stoker up` is
        hosts[lost].kill()
        wait_for(lambda: len(placed.hosts) == 3, LONG_S)
        keeps_answering(placed, wanted, 1.0)
        assert placed.hosts[2] != lost
        assert len(serving(tiny_folder)) == 2
    assert not serving(tiny_folder)


def test_a_gateway_moves_to_another_machine(cluster: RayMachines, tiny_folder: Path, tmp_path: Path) -> None:
    options = f'model = "{tiny_folder}"\ndevice = "cpu"\nthreads = 1\nkv_blocks = 200\ndtype = "float64"\ncount = 2'
    up = 'gateway_placement = "ray"\ngateway_resource = "front"'
    hosts = {one.address: one for one in cluster.machines[2:]}
    with fleet(tmp_path, cluster, options, 'store = "none"', up) as placed:
        (first,) = placed.part("gateway")["nodes"]
        wanted = placed.ask()
        hosts.pop(first).kill()
        wait_for(lambda: len(placed.addresses("gateway")) == 2, LONG_S)
        wait_for(placed.answers, LONG_S)
        assert placed.part("gateway")["nodes"] == list(hosts)
        assert placed.ask() == wanted
    assert not serving(tiny_folder)
