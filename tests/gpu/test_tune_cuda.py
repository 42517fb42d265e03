"""`stoker tune` on a real GPU: compile, measure, store, and use the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.support.model_shapes import LLAMA_8B
from stoker.cli import tune as command
from stoker.engine.tuning_file import TuningSystem, load_tuning, read_tuning, tuning_path
from stoker.kernels.tuned_tiles import use_tuned_tiles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_tuned_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | small))
    device = torch.device("cuda", 0)
    system = TuningSystem.of(device)
    path = tuning_path(tmp_path / "tuning", system)
    assert command._tune(tmp_path, tmp_path / "tuning", False) == 0
    tiles = read_tuning(path, system)
    assert len({key.outs for key in tiles}) == 4
    assert "Tuned" in capsys.readouterr().out
    load_tuning(path.parent, device)
    use_tuned_tiles({})
    assert command._tune(tmp_path, tmp_path / "tuning", False) == 0
    assert "already tuned" in capsys.readouterr().out
    assert read_tuning(path, system) == tiles
