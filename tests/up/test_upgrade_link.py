"""What `stoker up` does when the dashboard asks for an upgrade, with a real gateway and a command that a test can watch."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway.real_fleet import ADMIN_TOKEN, Process
from waiting import until

from stoker.up.upgrade_link import UpgradeLink

# Notes its arguments, and refuses as `stoker upgrade` does when nothing was changed yet.
REFUSES = """
import sys
open(sys.argv[1], "a").write(" ".join(sys.argv[2:]) + "\\n")
print("stoker: there are no workers")
sys.exit(2)
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Process]:
    (tmp_path / "admin").write_text(ADMIN_TOKEN)
    options = ["gateway", "--store", "none", "--admin-token-file", str(tmp_path / "admin")]
    process = Process([*options, "--worker", "http://127.0.0.1:9"], tmp_path / "gateway.log")
    process.start()
    try:
        yield process
    finally:
        process.stop()


def admin(gateway: Process, method: str, path: str = "") -> Any:
    request = urllib.request.Request(f"{gateway.url}/admin/upgrade{path}", method=method)
    request.add_header("Authorization", f"Bearer {ADMIN_TOKEN}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_an_upgrade_runs_once_for_each_wish_and_its_refusal_is_shown(gateway: Process, tmp_path: Path) -> None:
    told: list[str] = []
    calls = tmp_path / "calls"
    command = [sys.executable, "-c", REFUSES, str(calls)]

    async def main() -> None:
        link = UpgradeLink(lambda: gateway.url, ADMIN_TOKEN, lambda: command, told.append)
        running = asyncio.create_task(link.run())
        await until(lambda: admin(gateway, "GET")["followed"], 0.1)
        admin(gateway, "POST", "?worker=127.0.0.1:9")
        await until(lambda: admin(gateway, "GET")["outcome"] == "stopped: stoker: there are no workers", 0.1)
        admin(gateway, "POST")
        await until(lambda: calls.read_text().count("\n") == 2, 0.1)
        await until(lambda: told.count("upgrade: stoker: there are no workers") == 2, 0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    assert calls.read_text().splitlines() == ["127.0.0.1:9", ""]
    assert told[0] == "upgrade: asked for in the dashboard, of 127.0.0.1:9"
    assert "upgrade: asked for in the dashboard, of all workers" in told
