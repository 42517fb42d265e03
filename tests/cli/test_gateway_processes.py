"""`stoker gateway --processes N`: one port, one store; a killed process loses only its streams, and no ledger row."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from scripted_server import ScriptedServer
from test_gateway_cli import STOKER, Running, curl, started
from test_gateway_kill import NUM_CLIENTS, Clients, script
from waiting import until

from stoker.base.ids import WorkerId
from stoker.gateway.process_supervisor import ProcessSupervisor
from stoker.gateway.processes import joined_metrics
from stoker.proto.messages import WorkerRegistration
from stoker.worker.register import Registrar

TOKEN = "an-admin-token-for-tests"
ADMIN = ("-H", f"Authorization: Bearer {TOKEN}")
SEED = 4


def children(running: Running) -> list[int]:
    pid = running.process.pid
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until_answering(running: Running, number: int) -> None:
    deadline_s = time.monotonic() + 30
    patient = ("--retry", "30", "--retry-delay", "1", "--retry-connrefused")  # both may be down at the same moment
    while True:
        status = json.loads(curl(f"{running.url}/admin/status?process={number}", *patient, *ADMIN))
        if status.get("process") == number:
            return
        assert time.monotonic() < deadline_s, status
        time.sleep(0.1)


def options(tmp_path: Path, server: ScriptedServer) -> list[str]:
    (tmp_path / "token").write_text(TOKEN)
    store = ["--store", str(tmp_path / "store.db"), "--admin-token-file", str(tmp_path / "token")]
    return ["--worker", f"{server.url},dialect=openai", "--processes", "2", *store]


def test_killed_processes_lose_no_row_and_are_restarted(tmp_path: Path, server: ScriptedServer) -> None:
    server.script = script
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    with started(tmp_path, *options(tmp_path, server)) as running:
        for number in (0, 1):
            until_answering(running, number)
        stop = time.monotonic() + 5
        clients = Clients(running.url, stop)

        def keep_asking(name: str) -> None:
            turn = 0
            while time.monotonic() < stop:
                clients.run(f"{name}t{turn}")
                turn += 1

        threads = [threading.Thread(target=keep_asking, args=(f"c{one}",)) for one in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        kills = 0
        while time.monotonic() < stop - 1:
            time.sleep(rng.uniform(0.3, 0.7))
            alive = children(running)
            if len(alive) == 2:
                os.kill(rng.choice(alive), signal.SIGKILL)
                kills += 1
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for number in (0, 1):
            until_answering(running, number)
        assert running.stop() == 0
    assert kills >= 3
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        rows = list(connection.execute("SELECT x_request_id, status, completion_tokens FROM usage"))
        sums = connection.execute("SELECT SUM(requests) FROM usage_sums WHERE span_s = 3600").fetchone()[0]
    by_id = {row[0]: row[1:] for row in rows}
    assert len(by_id) == len(rows) == sums
    assert len(clients.complete) > NUM_CLIENTS
    assert all(by_id[one] == (200, 4) for one in clients.complete)
    assert all(num <= by_id[one][1] <= 4 for one, num in clients.pieces.items())


def test_operators_reach_every_process(tmp_path: Path, server: ScriptedServer) -> None:
    with started(tmp_path, *options(tmp_path, server)) as running:
        for number in (0, 1):
            until_answering(running, number)
        worker = server.url.removeprefix("http://")
        curl("-X", "POST", f"{running.url}/admin/drain?worker={worker}", *ADMIN)
        for number in (0, 1):
            fleet = json.loads(curl(f"{running.url}/admin/fleet?process={number}", *ADMIN))
            assert [one["draining"] for one in fleet["workers"]] == [True]
        page = curl(f"{running.url}/metrics")
        for number in (0, 1):
            assert f'stoker_gateway_running_requests{{process="{number}"}} 0' in page
        assert page.count("# TYPE stoker_gateway_running_requests ") == 1
        wrong = json.loads(curl(f"{running.url}/admin/status?process=2", *ADMIN))
        assert "from 0 to 1" in wrong["error"]["message"]
        assert json.loads(curl(f"{running.url}/admin/status?process=1", "-H", "x-stoker-process: 0"))["error"][
            "code"
        ] == ("invalid_admin_token")
        audits = json.loads(curl(f"{running.url}/admin/audit", *ADMIN))["audit"]
        assert [one["target"] for one in audits] == [worker] * 2
        assert running.stop() == 0


def test_an_error_of_the_first_process_ends_the_gateway(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_text("this is not a database, but it is long enough to look like one" * 20)
    command = [STOKER, "gateway", "--port", "0", "--processes", "3", "--store", str(tmp_path / "store.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "restore the latest backup" in done.stderr


def test_a_signal_while_the_first_process_starts_ends_the_gateway(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    slow = """
import signal, socket, sys, time
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
open(sys.argv[2], "w").close()
while not stopped:
    time.sleep(0.01)
with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", int(sys.argv[1])))
    listener.listen()
    listener.accept()
"""

    async def main() -> None:
        supervisor = ProcessSupervisor(
            2, lambda number, ports, is_restart: [sys.executable, "-c", slow, str(ports[number]), str(ready)]
        )
        running = asyncio.create_task(supervisor.run())
        await until(ready.exists)
        supervisor.stop(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await running == 0

    asyncio.run(main())


def test_pages_of_metrics_are_joined_by_family() -> None:
    pages = {
        0: b'# HELP a A\n# TYPE a counter\na{x="1"} 2\na 3\n# HELP b B\n# TYPE b gauge\nb 1\n',
        1: b'# HELP a A\n# TYPE a counter\na{x="}"} 5\n# HELP c C\n# TYPE c gauge\nc 9\n',
    }
    assert joined_metrics(pages).decode().splitlines() == [
        "# HELP a A",
        "# TYPE a counter",
        'a{x="1",process="0"} 2',
        'a{process="0"} 3',
        'a{x="}",process="1"} 5',
        "# HELP b B",
        "# TYPE b gauge",
        'b{process="0"} 1',
        "# HELP c C",
        "# TYPE c gauge",
        'c{process="1"} 9',
    ]


def test_a_worker_that_registers_is_known_to_every_process(tmp_path: Path, server: ScriptedServer) -> None:
    secret = "a-secret-of-enough-characters"
    (tmp_path / "secret").write_text(secret)
    news = WorkerRegistration(
        worker_id=WorkerId("w1"),
        url="http://127.0.0.1:9",
        role="unified",
        models=["m"],
        fingerprint="f",
        block_tokens=16,
        num_blocks=64,
        max_model_tokens=2048,
        events=None,
        replay=None,
        tokenizer="",
    )

    async def register(url: str, *, leave: bool) -> None:
        registrar = Registrar([url], lambda: news, secret, heartbeat_s=0.2)
        registrar.start()
        await asyncio.sleep(1.0)
        if leave:
            await registrar.leave()
        else:
            for task in registrar._heartbeats.values():
                task.cancel()
            await registrar._session.close()

    def workers(running: Running, number: int) -> set[str]:
        fleet = json.loads(curl(f"{running.url}/admin/fleet?process={number}", *ADMIN))
        return {one["worker"] for one in fleet["workers"]}

    with started(tmp_path, *options(tmp_path, server), "--secret-file", str(tmp_path / "secret")) as running:
        for number in (0, 1):
            until_answering(running, number)
        asyncio.run(register(running.url, leave=False))
        assert ["127.0.0.1:9" in workers(running, number) for number in (0, 1)] == [True, True]
        asyncio.run(register(running.url, leave=True))
        assert ["127.0.0.1:9" in workers(running, number) for number in (0, 1)] == [False, False]
