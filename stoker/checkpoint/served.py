"""Ask the model registry whether a config.json describes a model that Stoker serves, without importing torch here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from stoker.base.errors import ModelFilesError

_CHECK_MODULE = "stoker.models.config_check"
_REFUSED = 3  # the exit code of _CHECK_MODULE for a model that is not served
_DEADLINE_S = 120.0  # most of the time goes into importing torch: 2 to 4 s, more on a slow drive


def check_served(config: Path, model: str) -> None:
    """Raise ModelFilesError if the model family, the quantisation or another field of `config` is not supported.

    Takes a few seconds. Call it before expensive work (a download), not before each start: the engine repeats the check.
    """
    command = [sys.executable, "-m", _CHECK_MODULE, str(config)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelFilesError(f"{model}: checking {config} took more than {_DEADLINE_S:.0f} s") from error
    if done.returncode == _REFUSED:
        refusal = json.loads(done.stdout)
        raise ModelFilesError(f"{model} cannot be served: {refusal['message']}", code=refusal["code"])
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelFilesError(f"{model}: checking {config} failed with exit code {done.returncode}: {last_line}")
