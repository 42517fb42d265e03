"""Gateways and the Mooncake master on nodes of a Ray cluster: they answer there, and move when their node is lost.

Slow: a Ray cluster starts in some ten seconds. Skipped without Ray, and without Mooncake.
"""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker.real import wait_for

from stoker.kv.mooncake.master import is_installed
from tests.up.ray_cluster import LONG_S, RayNodes, commands, fleet, launched, ray_nodes, serving

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_installed(), reason="Mooncake is not installed"),
]
SECRET = "the secret of a fleet on many nodes"
KEY = "sk-of-a-client"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    resources: dict[int, dict[str, float]] = {2: {"front": 1}, 3: {"front": 1}, 4: {"meta": 1}, 5: {"meta": 1}}
    with ray_nodes(tmp_path_factory.mktemp("ray"), resources, num_cpus=3) as started:
        yield started


def gateways() -> set[int]:
    return {pid for pid, command in commands().items() if "stoker.cli.main" in command and "gateway" in command}


def masters() -> set[int]:
    return {pid for pid, command in commands().items() if command[0].endswith("/mooncake_master")}


def host(address: str) -> str:
    return address.rpartition("/")[2].partition(":")[0]


def test_a_gateway_moves_to_another_node(nodes: RayNodes, tiny_folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    gateway = f'secret_file = "{secret}"\nstore = "none"\nkey = [{{ name = "client", sha256 = "{digest}" }}]'
    up = (
        'gateway_placement = "ray"\ngateway_resource = "front"\nmooncake_resource = "meta"\n[store]\nmooncake = "start"'
    )
    options = f'model = "{tiny_folder}"\ndevice = "cpu"\nthreads = 1\nkv_blocks = 200\ndtype = "float64"\ncount = 2'
    with fleet(tmp_path, nodes, options, gateway, up) as placed:
        placed.headers["Authorization"] = f"Bearer {KEY}"
        (first,) = placed.addresses("gateway")
        assert host(first) in ("127.0.0.2", "127.0.0.3")
        assert host(placed.addresses("mooncake")[0]) in ("127.0.0.4", "127.0.0.5")
        assert placed.part("gateway")["nodes"] == [host(first)]
        assert placed.state()["gateway_url"] == first
        wanted = placed.ask()
        assert "mooncake_connected" in placed.log("unified-0")

        # The secret is on no command line, and in files that only this user can read.
        (process,) = gateways()
        assert not any(SECRET in word or KEY in word for command in commands().values() for word in command)
        table = Path(commands()[process][commands()[process].index("--config") + 1])
        assert SECRET not in table.read_text()
        assert stat.S_IMODE(table.stat().st_mode) == 0o600
        assert SECRET not in placed.log("gateway") + placed.log("unified-0") + placed.words.read_text()
        listed = subprocess.run(
            [sys.executable, "-m", "stoker.cli.main", "status"],
            env={**os.environ, "XDG_STATE_HOME": str(placed.state_home)},
            capture_output=True,
            text=True,
        )
        assert f"{host(first)} " in listed.stdout
        assert "NODE" in listed.stdout

        # A gateway whose process ends stays on its node, and keeps its address.
        os.kill(process, signal.SIGKILL)
        wait_for(lambda: len(placed.addresses("gateway")) == 2, LONG_S)
        assert placed.addresses("gateway") == [first, first]
        wait_for(placed.answers, LONG_S)
        assert placed.ask() == wanted

        # A gateway whose node is lost moves. The workers on other nodes go on, and register with it.
        workers = {name: placed.part(name)["nodes"] for name in ("unified-0", "unified-1")}
        before = serving(tiny_folder)
        nodes.kill(host(first))
        wait_for(lambda: len(placed.addresses("gateway")) == 3, LONG_S)
        assert {host(placed.url), host(first)} == {"127.0.0.2", "127.0.0.3"}
        wait_for(placed.answers, LONG_S)
        assert placed.ask() == wanted
        num_lost = sum(where == [host(first)] for where in workers.values())
        assert len(before & serving(tiny_folder)) == 2 - num_lost
        assert placed.num_restarts <= num_lost
    assert not gateways()
    assert not masters()
    assert not serving(tiny_folder)


def test_an_interrupted_and_a_killed_fleet_leave_nothing_behind(
    nodes: RayNodes, tiny_folder: Path, tmp_path: Path
) -> None:
    options = f'model = "{tiny_folder}"\ndevice = "cpu"\nthreads = 1\nkv_blocks = 200'
    store = '[store]\nmooncake = "start"'
    (tmp_path / "waiting").mkdir()
    nowhere = f'gateway_placement = "ray"\ngateway_resource = "nowhere"\n{store}'
    with launched(tmp_path / "waiting", nodes, options, 'store = "none"', nowhere) as waiting:
        wait_for(lambda: "up.gateway_resource='nowhere'" in waiting.words.read_text(), LONG_S)
        assert (
            "gateway: stoker up: waits for Ray to find a node with {'CPU': 1, 'nowhere': 1.0}"
            in waiting.words.read_text()
        )
        assert masters()
        waiting.process.send_signal(signal.SIGINT)
        assert waiting.process.wait(LONG_S) == 130
        assert not masters()

    # The gateway has two processes, which read the files of their parent.
    up, listen = f'gateway_placement = "ray"\n{store}', "port = 0, processes = 2"
    with launched(tmp_path, nodes, options, 'store = "none"', up, listen) as killed:
        wait_for(lambda: "curl -s" in killed.words.read_text(), LONG_S)
        assert killed.ask()
        assert len(gateways()) == 3
        assert masters()
        assert serving(tiny_folder)
        killed.process.kill()
        wait_for(lambda: not (gateways() | masters() | serving(tiny_folder)), LONG_S)


def test_two_gateways_and_a_master_that_moves(nodes: RayNodes, tiny_folder: Path, tmp_path: Path) -> None:
    up = 'gateway_placement = "ray"\ngateways = 2\nmooncake_resource = "meta"\n[store]\nmooncake = "start"'
    options = f'model = "{tiny_folder}"\ndevice = "cpu"\nthreads = 1\nkv_blocks = 200\ndtype = "float64"\ncount = 2'
    with fleet(tmp_path, nodes, options, 'store = "none"', up) as placed:
        urls = [placed.addresses(f"gateway-{number}")[0] for number in (0, 1)]
        assert len(set(urls)) == 2
        wanted = placed.ask(urls[0])
        assert placed.ask(urls[1]) == wanted
        (first,) = placed.addresses("mooncake")
        (process,) = masters()
        os.kill(process, signal.SIGKILL)
        wait_for(lambda: len(placed.addresses("mooncake")) == 2, LONG_S)
        assert placed.addresses("mooncake") == [first, first]

        # The master moves, and the workers are restarted with its new address.
        nodes.kill(host(first))
        wait_for(lambda: len(placed.addresses("mooncake")) == 3, LONG_S)
        new = placed.addresses("mooncake")[-1]
        assert {host(first), host(new)} == {"127.0.0.4", "127.0.0.5"}

        def all_use(address: str) -> bool:
            served = [commands()[pid] for pid in serving(tiny_folder)]
            return len(served) == 2 and all(address in command for command in served)

        wait_for(lambda: all_use(new), LONG_S)
        wait_for(placed.answers, LONG_S)
        assert placed.ask() == wanted
    assert not gateways()
    assert not masters()
    assert not serving(tiny_folder)
