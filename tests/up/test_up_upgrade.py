"""`stoker up` upgrades its workers when the dashboard asks its gateway for it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from test_up_real import LONG_S, RealUp, fleet_of, up
from worker.real import wait_for


def admin(fleet: RealUp, path: str, method: str = "GET") -> Any:
    request = urllib.request.Request(f"{fleet.url}/admin/{path}", method=method)
    request.add_header("Authorization", f"Bearer {Path(fleet.state()['admin_token_file']).read_text().strip()}")
    with urllib.request.urlopen(request, timeout=LONG_S) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_the_dashboard_asks_for_an_upgrade_and_stoker_up_carries_it_out_once(tmp_path: Path, tiny_folder: Path) -> None:
    with up(tmp_path, fleet_of(tiny_folder, "count = 2")) as fleet:
        wait_for(lambda: bool(fleet.url), 120)
        wait_for(lambda: admin(fleet, "upgrade")["followed"], LONG_S)
        pids = {name: fleet.part(name)["pid"] for name in ("unified-0", "unified-1")}
        worker = fleet.part("unified-1")["address"].removeprefix("http://")
        assert admin(fleet, f"upgrade?worker={worker}", "POST")["number"] == 1
        wait_for(lambda: admin(fleet, "upgrade")["running"], LONG_S)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            admin(fleet, "upgrade", "POST")
        assert fleet.answers()
        wait_for(lambda: bool(admin(fleet, "upgrade")["outcome"]), 3 * LONG_S)
        assert admin(fleet, "upgrade")["outcome"] == f"{worker} was restarted"
        assert fleet.part("unified-0")["pid"] == pids["unified-0"]
        assert fleet.part("unified-1")["pid"] != pids["unified-1"]
        assert fleet.answers()
        wait_for(lambda: f"upgrade: {worker}: done, 1 of 1" in fleet.words.read_text(), LONG_S)
        assert fleet.words.read_text().count("upgrade: asked for in the dashboard") == 1
