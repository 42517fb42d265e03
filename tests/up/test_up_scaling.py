"""`stoker up` follows the autoscaler of its gateway: real workers start and end, also when the gateway dies in between."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.real_fleet import Exchange
from test_up_real import LONG_S, RealUp, up
from worker.real import is_alive, wait_for

AUTOSCALE = """
[gateway.autoscale]
mode = "on"
max_workers = 2
itl_s = 1e-6        # any running request is too much
ttft_s = 1000
interval_s = 0.2
confirm = 2
hold_s = 1
reverse_s = 2
warm_s = 0
start_s = 120
"""


def scaled_fleet(folder: Path) -> str:
    return f"""
{AUTOSCALE}
[[workers]]
model = "{folder}"
served_name = ["tiny"]
threads = 1
kv_blocks = 400
max_count = 3
[up]
first_pause_s = 0.1
"""


@contextmanager
def load(fleet: RealUp) -> Iterator[Exchange]:
    """Keep one request running."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    running = Exchange(int(fleet.url.rpartition(":")[2]), body, path="/v1/completions")
    try:
        yield running
    finally:
        running.leave()


def said(fleet: RealUp, text: str) -> bool:
    return text in fleet.words.read_text()


def test_workers_start_and_end_with_the_load_and_only_once(tmp_path: Path, tiny_folder: Path) -> None:
    with up(tmp_path, scaled_fleet(tiny_folder)) as fleet:
        wait_for(lambda: bool(fleet.url), 120)
        assert [part["name"] for part in fleet.state()["parts"]] == ["gateway", "unified-0"]
        with load(fleet):
            wait_for(lambda: said(fleet, "unified-1: wanted by the autoscaler"), LONG_S)
            os.kill(fleet.part("gateway")["pid"], signal.SIGKILL)
        wait_for(fleet.answers, LONG_S)
        wait_for(lambda: said(fleet, "unified-1: ready at"), 2 * LONG_S)
        # The second gateway has forgotten its wish. Under load it wants a worker again, unless it sees the one that joins.
        with load(fleet):
            wait_for(lambda: len(ready(fleet)) == 2, LONG_S)
        assert not said(fleet, "unified-2: wanted")

        wait_for(lambda: said(fleet, "the autoscaler does not need it; ending it"), LONG_S)
        wait_for(lambda: len(fleet.state()["parts"]) == 2, LONG_S)
        assert len(ready(fleet)) == 1
        assert fleet.answers()
        below = fleet.descendants()
        assert len(below) == 3, "gateway, server and engine"
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(LONG_S) == 0
        assert not [pid for pid in below if is_alive(pid)]


def ready(fleet: RealUp) -> list[str]:
    """Return the workers that serve, as the gateway sees them."""
    request = urllib.request.Request(f"{fleet.url}/admin/fleet")
    request.add_header("Authorization", f"Bearer {Path(fleet.state()['admin_token_file']).read_text().strip()}")
    with urllib.request.urlopen(request, timeout=LONG_S) as answer:
        workers = json.loads(answer.read())["workers"]
    return [one["worker"] for one in workers if one["usable"] and not one["draining"]]
