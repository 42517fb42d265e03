"""Engines without HTTP: the compared shapes are served, pairs run in processes of their own, and targets are attached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.engine import offline
from bench.support.engine_children import IMPORTED, EngineChild, measure_in_turn
from bench.support.model_shapes import COMPARED, SHAPES, title
from stoker.models.family import family_of

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


def test_six_shapes_are_compared_dense_and_moe_and_none_of_the_tuned_ones():
    assert len(COMPARED) >= 6
    assert not {name.partition("-")[0] for name in COMPARED} & {"llama8b", "qwen30a3b"}
    assert {"num_experts" in SHAPES[name] for name in COMPARED} == {True, False}
    assert {"quantization_config" in SHAPES[name] for name in COMPARED} == {True, False}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_belongs_to_a_family_and_has_a_title(name: str):
    shape = family_of(SHAPES[name], name).shape
    assert shape.num_layers == SHAPES[name]["num_hidden_layers"]
    assert title(name)


def test_results_have_targets_and_the_name_of_the_competitor():
    ours = {"engine": "stoker", "decode_b1_ms": 5.0, "prefill_4k_toks": 100.0, "kv_gib": 10.0}
    theirs = {"engine": "vllm", "version": "0.26.0", "decode_b1_ms": 6.0, "prefill_4k_toks": 110.0}
    made = {result.metric: result for result in offline.results("A", {"vllm": theirs, "stoker": ours})}
    decode = made["decode step, batch 1"]
    assert (decode.competitor, decode.ratio, decode.target) == ("vLLM 0.26.0", pytest.approx(1.2), 1.2)
    assert made["prefill, 16 prompts of 4,096 tokens"].ratio == pytest.approx(100 / 110)
    assert made["KV memory"].competitor == ""
    assert made["KV memory"].target is None
    assert offline.results("A", {"vllm": theirs}) == []


def test_an_engine_that_fails_is_reported_and_the_others_are_measured(tmp_path: Path, capsys):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SHAPES["llama8b"], **TINY, "rope_scaling": None}))
    argv = ["--model", str(folder), "--random-weights", "--small", "--batches", "1", "--only", "decode"]
    more = ["--device", "cpu", "--threads", "1", "--kv-memory-gib", "0.01", "--engine", "vllm", "stoker"]
    assert main(["run", "offline", *argv, *more, "--log-dir", str(tmp_path / "logs")]) == 1
    shown = capsys.readouterr()
    assert "tiny-vllm gave no results" in shown.err
    assert "No module named 'vllm'" in shown.out
    assert "tiny, decode step, batch 1: " in shown.out


def test_engines_that_exceed_the_limit_are_stopped(tmp_path: Path, capsys):
    slow = EngineChild("slow", ["offline", "--shape", "llama1b", "--device", "cpu", "--wait"], {})
    assert measure_in_turn([slow], tmp_path, timeout_s=60, limit_s=0) == {}
    assert "slow failed: FileNotFoundError" in capsys.readouterr().out
    assert (tmp_path / "slow.log").read_text().splitlines()[0] == IMPORTED


def test_a_file_of_another_run_is_for_one_shape_and_engine(tmp_path: Path, capsys):
    argv = ["--shape", "compared", "--competitor", str(tmp_path / "x.json")]
    assert main(["run", "offline", *argv]) == 2
    assert "--competitor is for one shape and one engine" in capsys.readouterr().err
