"""Agents' SDKs, unmodified, through a loop of ten tool calls against a real gateway and worker with the scripted model.

Slow, because each client is a process of its own that imports a large SDK. The SDKs are not dependencies of the tests. A client
is skipped if its packages are missing. To install all of them:

    python -m venv clients/python
    clients/python/bin/pip install openai anthropic openai-agents 'pydantic-ai-slim[openai,anthropic]' langchain langchain-openai
    npm install --prefix clients/javascript openai @anthropic-ai/sdk ai @ai-sdk/openai @ai-sdk/openai-compatible \
        @ai-sdk/anthropic zod

and run with STOKER_TEST_CLIENTS=clients.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from gateway.real_fleet import RealFleet, real_fleet
from scripted.script_folder import call, python_path, write_script
from worker.real import wait_for

from clients.ledger_rows import LedgerRow, new_rows

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FOLDER = os.environ.get("STOKER_TEST_CLIENTS")
TURNS = 10
END = "All ten files are read."
ANSWERS = [*(call("read_file", path=f"file-{number}.txt") for number in range(TURNS)), END]
BLOCK_TOKENS = 16  # a CPU worker's

PYTHON = {
    "openai_chat": [""],
    "openai_responses": [""],
    "anthropic_messages": [""],
    "openai_agents": ["chat", "responses"],
    "pydantic_ai_agent": ["chat", "responses", "messages"],
    "langchain_agent": [""],
}
JAVASCRIPT = {
    "openai_chat": [""],
    "openai_responses": [""],
    "anthropic_messages": [""],
    "vercel_ai": ["chat", "responses", "messages"],
}


@pytest.fixture(scope="module")
def fleet(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    work = tmp_path_factory.mktemp("clients")
    folder = write_script(work / "model", smollm2, ANSWERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path())
        options = ["--dtype", "float32", "--kv-blocks", "20000", "--served-name", "scripted"]
        with real_fleet(folder, work, 2, worker_options=options) as fleet:
            yield fleet


@pytest.mark.parametrize(("name", "api"), [(name, api) for name, apis in PYTHON.items() for api in apis])
def test_a_python_client_completes_its_loop(fleet: RealFleet, name: str, api: str, tmp_path: Path) -> None:
    python = Path(FOLDER or "") / "python" / "bin" / "python"
    if FOLDER is None or not python.is_file():
        pytest.skip("set STOKER_TEST_CLIENTS to the folder of the clients")
    run_client(fleet, [str(python.absolute()), str(HERE / "python" / f"{name}.py")], api, tmp_path)


@pytest.mark.parametrize(("name", "api"), [(name, api) for name, apis in JAVASCRIPT.items() for api in apis])
def test_a_javascript_client_completes_its_loop(fleet: RealFleet, name: str, api: str, tmp_path: Path) -> None:
    packages = Path(FOLDER or "") / "javascript" / "node_modules"
    if FOLDER is None or not packages.is_dir() or shutil.which("node") is None:
        pytest.skip("set STOKER_TEST_CLIENTS to the folder of the clients, and install node")
    # Node looks for packages beside the script.
    (tmp_path / "node_modules").symlink_to(packages.absolute())
    script = shutil.copy(HERE / "javascript" / f"{name}.mjs", tmp_path)
    run_client(fleet, ["node", str(script)], api, tmp_path)


def run_client(fleet: RealFleet, command: list[str], api: str, work: Path) -> None:
    """Run a client to its end, and check that each turn found what the turn before had sent."""
    wait_for(lambda: fleet.gateway.metrics()["stoker_gateway_ledger_pending_rows"] == 0)
    seen = {row.request_id for row in new_rows(fleet.ledger_path)}
    arguments = [fleet.gateway.url, "scripted", str(TURNS), *([api] if api else [])]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=180, cwd=work, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith(END), done.stdout + done.stderr
    wait_for(lambda: fleet.gateway.metrics()["stoker_gateway_ledger_pending_rows"] == 0)
    rows = new_rows(fleet.ledger_path, seen)
    assert [row.status for row in rows] == [200] * (TURNS + 1)
    check_hits(rows)


def check_hits(rows: list[LedgerRow]) -> None:
    """Of the tokens in full blocks that the turn before had sent, at least 95% must be cached."""
    sent = sum(row.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS for row, _ in pairwise(rows))
    hits = sum(
        min(after.cached_tokens, before.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        for before, after in pairwise(rows)
    )
    assert hits >= 0.95 * sent, [(row.prompt_tokens, row.cached_tokens, row.misses) for row in rows]
