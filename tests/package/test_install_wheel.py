"""`pip install` of the wheel into an empty environment, then the first request. Minutes long: it installs torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START_S = 300.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_installed_wheel_answers_the_first_request(tmp_path: Path) -> None:
    """Needs a package index that pip can reach."""
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT]
    subprocess.run(pip, check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    install = [venv / "bin" / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(install, check=True, cwd=tmp_path)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["XDG_STATE_HOME"] = str(tmp_path / "state")
    command = [venv / "bin" / "stoker", "up", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as process:
        giving_up = threading.Timer(START_S, process.kill)
        giving_up.start()
        try:
            assert process.stdout is not None
            address = next(
                one[1] for line in process.stdout if (one := re.search(r"(http://127\.0\.0\.1:\d+/v1/)", line))
            )
            body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
            request = urllib.request.Request(
                f"{address}chat/completions",
                json.dumps({"model": "SmolLM2-135M-Instruct", **body}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                text = json.load(answer)["choices"][0]["message"]["content"]
            assert text == "The capital of France is Paris."
        finally:
            giving_up.cancel()
            process.send_signal(signal.SIGINT)
            process.stdout.read() if process.stdout is not None else None
            assert process.wait(60) == 0
