"""Calibrations of published models on H200 GPUs, as `stoker calibrate CONFIG --gpu` estimates them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.support.model_shapes import SHAPES
from stoker import __version__
from stoker.cli.main import main
from stoker.sim.calibration import Calibration, read_calibration


def estimated_worker(shape: str, gpus: str, **config: Any) -> Calibration:
    """Return the estimate for a published shape. `config` changes its config.json."""
    with tempfile.TemporaryDirectory() as scratch:
        path, output = Path(scratch, f"{shape}.json"), Path(scratch, "calibration.json")
        path.write_text(json.dumps({**SHAPES[shape], **config}), encoding="utf-8")
        code = main(["calibrate", str(path), "--gpu", gpus, "--output", str(output)])
        assert code == 0, "stoker calibrate failed"
        return read_calibration(output, __version__)


def kimi_k25() -> Calibration:
    """Return the worker of the experiments: Kimi K2.5 with all of its layers on 8 H200 GPUs."""
    return estimated_worker("kimik25-int4", "8xH200", num_hidden_layers=61)
