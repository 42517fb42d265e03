"""`stoker up` on a Ray cluster of three nodes and a head: a node is killed, answers continue, and the fleet gets its size back.

Slow: a Ray cluster starts in some ten seconds. Skipped without Ray.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway.real_fleet import Exchange
from worker.real import is_alive, wait_for

from tests.up.ray_cluster import LONG_S, RayNodes, fleet, ray_nodes, serving

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    with ray_nodes(tmp_path_factory.mktemp("ray"), {2: {}, 3: {}, 4: {}}) as started:
        yield started


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
    up = 'gateway_placement = "ray"'
    with fleet(
        tmp_path, nodes, f"max_count = 2\n{options}", f'store = "none"\nautoscale = {{ {scale} }}', up
    ) as scaled:
        assert len(scaled.hosts) == 1
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        host, _, port = scaled.url.removeprefix("http://").partition(":")
        running = Exchange(int(port), body, path="/v1/completions", host=host)
        wait_for(lambda: len(scaled.hosts) == 2, LONG_S)
        assert len(serving(tiny_folder)) == 2
        running.leave()
        wait_for(lambda: len(serving(tiny_folder)) == 1, LONG_S)
        assert scaled.ask()
        assert scaled.num_restarts == 0
    assert not serving(tiny_folder)
