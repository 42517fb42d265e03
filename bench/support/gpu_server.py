"""One OpenAI-compatible server on a GPU: `stoker serve`, or vLLM's API server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from bench.contract import BenchmarkError
from bench.support.processes import environment

SERVERS = ("stoker", "vllm")
PORT = 23000
MODEL = "bench"
START_TIMEOUT_S = 300.0
_QUIET_S = 3.0  # Stoker continues its preparations after up to 2 s without a request
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COMMANDS = {
    "stoker": ("stoker.cli.main", "serve", "{folder}", "--served-name", MODEL, "--no-events", "--timeline"),
    "vllm": ("vllm.entrypoints.openai.api_server", "--model", "{folder}", "--served-model-name", MODEL),
}
_CONTEXT_OPTION = {"stoker": "--max-model-tokens", "vllm": "--max-model-len"}
ENVIRONMENT: dict[str, dict[str, str]] = {
    "stoker": {},
    "vllm": {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
}


def server_command(kind: str, folder: Path, context: int, port: int, arguments: Sequence[str]) -> list[str]:
    """The command that serves a model folder on this machine's GPU."""
    settings = [f"{name}={value}" for name, value in ENVIRONMENT[kind].items()]
    words = [word.format(folder=folder) for word in _COMMANDS[kind]]
    options = ["--port", str(port), _CONTEXT_OPTION[kind], str(context), *arguments]
    return ["env", *settings, sys.executable, "-m", *words, *options]


class GpuServer:
    """The server's processes, from their start to their end."""

    def __init__(self, kind: str, folder: Path, context: int, arguments: list[str], log: Path) -> None:
        command = server_command(kind, folder, context, PORT, arguments)
        self.started_s = time.time()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )

    def first_token_s(self) -> float:
        """Wait for the first token; return the seconds since the start of the process."""
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        while time.time() - self.started_s < START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise BenchmarkError(f"the server ended with {self.process.returncode}")
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    answer.read()
                    return time.time() - self.started_s
            except OSError:
                time.sleep(0.02)
        raise BenchmarkError(f"the server gave no token within {START_TIMEOUT_S:g} s")

    def settle(self) -> float:
        """Wait until the server does nothing by itself any more; return the CPU seconds it used for that."""
        before_s = last_s = now_s = sum(self.cpu_s().values())
        quiet_s = 0.0
        for _ in range(60):
            time.sleep(0.5)
            now_s = sum(self.cpu_s().values())
            quiet_s = quiet_s + 0.5 if now_s - last_s < 0.05 else 0.0
            if quiet_s >= _QUIET_S:
                break
            last_s = now_s
        return now_s - before_s

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process, with those of its ended children, by process id and name."""
        stats: dict[int, tuple[int, str, float]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = path.read_text()
            except OSError:
                continue
            name = text[text.index("(") + 1 : text.rindex(")")]
            fields = text[text.rindex(")") + 2 :].split()
            stats[int(path.parent.name)] = (int(fields[1]), name, sum(map(int, fields[11:15])) / _TICKS_PER_S)
        found, left = dict[str, float](), [self.process.pid]
        while left:
            pid = left.pop()
            if pid in stats:
                found[f"{pid}:{stats[pid][1]}"] = stats[pid][2]
                left += [child for child, (parent, _, _) in stats.items() if parent == pid]
        return found

    def children(self) -> list[int]:
        """The processes that the server itself started."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
