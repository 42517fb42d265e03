"""What `stoker tune` measures, and which tiles it keeps. tests/gpu/test_tune_cuda.py measures for real."""

from __future__ import annotations

import json

import pytest
import torch

from bench.support.model_shapes import LLAMA_8B, QUANTIZED, QWEN_30B_A3B
from stoker.cli.main import main
from stoker.engine import tune as tuning
from stoker.engine.tune import DenseMatmul, dense_matmuls, tune, tuning_jobs
from stoker.kernels.tile_choice import is_library_faster, skinny_tile
from stoker.kernels.tuned_tiles import CHECKS

CPU = torch.device("cpu")


def matmuls(tmp_path, config) -> set[tuple[str, int, int, int]]:
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return {(one.kind, one.outs, one.ins, len(one.layers)) for one in dense_matmuls(tmp_path)}


def test_every_distinct_weight_shape_of_a_model_is_tuned_once(tmp_path):
    layers = {("bf16", 6144, 4096, 2), ("bf16", 4096, 4096, 2), ("bf16", 28672, 4096, 2), ("bf16", 4096, 14336, 2)}
    assert matmuls(tmp_path, LLAMA_8B) == layers | {("bf16", 128256, 4096, 1)}
    assert matmuls(tmp_path, LLAMA_8B | {"tie_word_embeddings": True}) == layers | {("bf16", 128256, 4096, 1)}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantised_weights_are_tuned_as_they_are_stored(tmp_path, kind):
    found = matmuls(tmp_path, LLAMA_8B | {"quantization_config": QUANTIZED[kind]})
    assert {one[0] for one in found if one[1] != 128256} == {kind}


def test_experts_and_weights_with_a_bias_are_left_out(tmp_path):
    assert {one[1:3] for one in matmuls(tmp_path, QWEN_30B_A3B)} == {(5120, 2048), (2048, 4096), (151936, 2048)}
    assert {one[1:3] for one in matmuls(tmp_path, LLAMA_8B | {"attention_bias": True, "mlp_bias": True})} == {
        (128256, 4096)
    }


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(tuning, "overlaps", lambda x: True)


def test_all_that_can_be_found_is_valid_in_the_file(hopper):
    jobs = tuning_jobs([DenseMatmul(kind, 4096, 14336, ["x"]) for kind in ("bf16", "fp8", "blocks", "int4")], CPU)
    assert {(key.kind, key.rows) for key, _ in jobs} == {
        ("bf16", 1), ("bf16", 16), ("bf16", 32), ("bf16", 64),
        *((kind, rows) for kind in ("fp8", "blocks", "int4") for rows in (16, 64)),
    }  # fmt: skip
    for key, job in jobs:
        assert all(CHECKS[key.kernel](key, tuning.numbers_of(tile)) for tile in job.tiles)
        assert skinny_tile(job.kind, job.rows, job.outs, job.ins) in job.tiles


def test_older_gpus_have_kernels_for_one_row_only():
    jobs = tuning_jobs([DenseMatmul("int4", 4096, 4096, ["x"])], CPU)
    assert [(job.kind, job.rows) for _, job in jobs] == [("bf16", 1)]


@pytest.mark.parametrize(("gain", "is_kept"), [(1.0, False), (1.01, False), (1.1, True)])
def test_only_a_clearly_faster_tile_replaces_the_prediction(hopper, monkeypatch, gain, is_kept):
    jobs = [one for one in tuning_jobs([DenseMatmul("bf16", 4096, 4096, ["x"])], CPU) if one[0].rows == 16]
    shape = ("bf16", 16, 4096, 4096)
    assert not is_library_faster(*shape)
    default, other = (
        skinny_tile(*shape),
        next(tile for tile in jobs[0][1].tiles if tile not in (skinny_tile(*shape), None)),
    )
    times = dict.fromkeys(jobs[0][1].tiles, 30.0) | {default: 20.0, other: 20.0 / gain}
    monkeypatch.setattr(
        tuning, "time_tiles", lambda job: sorted(((us, t) for t, us in times.items()), key=lambda x: x[0])
    )
    [found] = tune(jobs)
    assert found.tile == (other if is_kept else default)
    assert found.default_us == 20.0


def test_a_machine_without_a_gpu_says_so(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["tune", str(tmp_path)]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
