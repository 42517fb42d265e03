"""Coding agents, started with `stoker launch`, through ten tool calls against a real gateway and worker.

Slow, and not dependencies of the tests. They are skipped if they are missing. To install them:

    npm install --prefix clients/agents @openai/codex opencode-ai

and run with STOKER_TEST_CLIENTS=clients. Claude Code is not run here, because its licence does not say that it may be; the
requests that it sends are tested by their shape (tests/gateway/test_real_messages.py, tests/clients/python/anthropic_messages.py).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from gateway.real_fleet import RealFleet, real_fleet
from scripted.script_folder import call, python_path, write_script
from worker.real import STOKER, wait_for

from clients.ledger_rows import new_rows
from clients.test_clients import check_hits

pytestmark = pytest.mark.slow

TURNS = 10
END = "All ten steps are done."
FOLDER = os.environ.get("STOKER_TEST_CLIENTS")


@contextmanager
def scripted_fleet(answers: Sequence[str], smollm2: Path, work: Path) -> Iterator[RealFleet]:
    folder = write_script(work / "model", smollm2, answers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path())
        options = ["--dtype", "float32", "--kv-blocks", "20000", "--served-name", "scripted"]
        with real_fleet(folder, work, 1, worker_options=options) as fleet:
            yield fleet


def launch(fleet: RealFleet, work: Path, tool: str, *arguments: str) -> str:
    """Run an agent in an empty project, with a home folder of its own."""
    programs = Path(FOLDER or "") / "agents" / "node_modules" / ".bin"
    if FOLDER is None or not (programs / tool).exists():
        pytest.skip(f"set STOKER_TEST_CLIENTS to a folder with agents/node_modules/.bin/{tool}")
    home, project = work / "home", work / "project"
    home.mkdir()
    project.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    environment = {
        "HOME": str(home),
        "CODEX_HOME": str(home),
        "PATH": f"{programs.absolute()}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    command = [STOKER, "launch", "--url", fleet.gateway.url, "--model", "scripted", tool, "--", *arguments]
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_turns(fleet: RealFleet, num_others: int) -> None:
    """Check the rows of the conversation. `num_others` requests before it are about something else, such as a title."""
    wait_for(lambda: fleet.gateway.metrics()["stoker_gateway_ledger_pending_rows"] == 0)
    rows = new_rows(fleet.ledger_path)
    assert [row.status for row in rows] == [200] * (num_others + TURNS + 1)
    check_hits(sorted(rows, key=lambda row: row.prompt_tokens)[num_others:])


def test_codex_completes_ten_steps(smollm2: Path, tmp_path: Path) -> None:
    answers = [*(call("exec_command", cmd=f"echo step-{number}") for number in range(TURNS)), END]
    with scripted_fleet(answers, smollm2, tmp_path) as fleet:
        options = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
        shown = launch(fleet, tmp_path, "codex", *options, "Do all steps.")
        assert shown.strip().endswith(END)
        check_turns(fleet, num_others=0)


def test_opencode_completes_ten_steps(smollm2: Path, tmp_path: Path) -> None:
    answers = [
        *(call("bash", command=f"echo step-{number}", description="A step") for number in range(TURNS)),
        END,
    ]
    with scripted_fleet(answers, smollm2, tmp_path) as fleet:
        assert END in launch(fleet, tmp_path, "opencode", "run", "Do all steps.")
        check_turns(fleet, num_others=1)
