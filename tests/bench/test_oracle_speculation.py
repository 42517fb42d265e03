"""Speculation at a given acceptance: the whole benchmark on a tiny model, and the comparisons that it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.contract import BenchmarkError
from bench.engine import oracle_speculation
from bench.support.decode_window import measure_window
from bench.support.draft_head import head_config, tensor_shapes
from bench.support.model_shapes import SHAPES

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rope_scaling": None,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SHAPES["llama8b"], **TINY}))
    return folder


def measured(folder: Path, tmp_path: Path, *more: str) -> dict[str, Any]:
    argv = ["run", "oracle_speculation", "--model", str(folder), "--random-weights", "--small", "--device", "cpu"]
    options = [
        "--threads",
        "1",
        "--kv-memory-gib",
        "0.01",
        "--head-vocab",
        "128",
        "--details",
        str(tmp_path / "out.json"),
    ]
    assert main([*argv, *options, *more]) == 0
    return json.loads((tmp_path / "out.json").read_text())


def test_fixed_numbers_of_drafts_are_verified_and_answers_do_not_change(folder: Path, tmp_path: Path, capsys):
    details = measured(folder, tmp_path, "--engine", "stoker", "--drafts", "1", "3")
    runs = details["stoker"]["runs"]
    assert [(run["batch"], run["drafts"]) for run in runs if run["batch"] == 4] == [
        (4, name) for name in ("off", "1", "3", "auto", "auto, all wrong", "off")
    ]
    assert not any(run["differing"] for run in runs)
    for run in runs:
        if run["drafts"].isdecimal():
            expected = sum(0.8**at for at in range(int(run["drafts"]) + 1))
            assert run["tokens_per_row"] == pytest.approx(expected, rel=0.15)  # a little less at the ends of tapes
            assert 0.6 < run["luck"] < 1.4
        if run["drafts"] == "off":
            assert (run["drafts_per_row"], run["luck"]) == (0, 1)
    shown = capsys.readouterr().out
    assert "best number of drafts: speed" in shown
    assert "verification step, 3 drafts" in shown  # of one row, beside off at batch 4


def test_engines_run_in_processes_of_their_own_and_a_missing_one_is_named(folder: Path, tmp_path: Path, capsys):
    argv = [
        "run",
        "oracle_speculation",
        "--model",
        str(folder),
        "--random-weights",
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    argv += ["--kv-memory-gib", "0.01", "--head-vocab", "128", "--batches", "2", "--decode-tokens", "24"]
    argv += [
        "--prompt-tokens",
        "16",
        "--drafts",
        "2",
        "--eagle3-drafts",
        "2",
        "--max-rows",
        "16",
        "--step-tokens",
        "64",
    ]
    argv += ["--engine", "stoker", "fast", "eagle3", "vllm", "--vllm-drafts", "3", "--log-dir", str(tmp_path / "logs")]
    assert main(argv) == 1
    shown = capsys.readouterr()
    assert "vllm 3 gave no results" in shown.err
    assert "answers differ" not in shown.err
    assert "off, exact: speed" in shown.out
    assert "EAGLE-3 head, 2 drafts: speed-up" in shown.out


def test_the_window_begins_when_all_decode_and_ends_with_the_first_answer():
    steps = [{0: 3}, {0: 2, 1: 4}, {0: 2, 1: 2}, {}, {0: 3, 1: 1}, {1: 3}]
    counted = iter("ab")
    window = measure_window(steps, 2, 10, lambda: next(counted))
    assert (window.tokens, window.before, window.after) == (8, "a", "b")
    assert window.seconds > 0
    with pytest.raises(BenchmarkError, match="too short for 2 sequences"):
        measure_window([{0: 4}, {1: 4}], 2, 4, int)
    with pytest.raises(BenchmarkError, match="answers of 3 to 4 tokens instead of 4"):
        measure_window([{0: 4}, {1: 3}], 2, 4, int)


def run_of(batch: int, drafts: str, speed: float, **more: float) -> dict[str, Any]:
    return {"batch": batch, "drafts": drafts, "tokens_per_s": speed, "wall_step_ms": 4.0, "differing": 0,
            "drafts_per_row": 2.0, **more}  # fmt: skip


def test_results_have_the_targets_of_the_shape_and_the_speed_ups_of_both_engines():
    ours = [run_of(1, "off", 100), run_of(1, "3", 280, step_ms=4.2), run_of(1, "5", 270), run_of(1, "auto", 275),
            run_of(1, "auto, all wrong", 99), run_of(1, "off", 102), run_of(4, "off", 400, step_ms=4.1)]  # fmt: skip
    found = {
        "stoker": {"runs": ours},
        "eagle3": {"runs": [run_of(1, "3", 90, wall_step_ms=10.0)]},
        "vllm 0": {"version": "0.26.0", "runs": [run_of(1, "off", 80)]},
        "vllm 3": {"version": "0.26.0", "runs": [run_of(1, "3", 160)]},
    }
    results = oracle_speculation.results("A", "llama8b", 0.8, found)
    by_metric = {one.metric: one for one in results if "batch 1," in one.case}
    best = by_metric["best number of drafts: speed"]
    assert (best.value, best.competitor_value, best.target) == (280, 101, 2.6)
    assert by_metric["auto: speed"].ratio == pytest.approx(275 / 280)
    assert by_metric["verification step, 3 drafts"].ratio == pytest.approx(4.1 / 4.2)
    beside = by_metric["best number of drafts: speed-up beside vLLM"]
    assert (beside.value, beside.competitor_value) == (pytest.approx(280 / 101), 2)
    computed = by_metric["EAGLE-3 head, 3 drafts: speed"]
    assert computed.value == pytest.approx((1 + 0.8 + 0.64 + 0.512) * 100)
    assert (computed.competitor, computed.competitor_value) == ("vLLM 0.26.0", 160)
    assert not oracle_speculation.problems(found)
    ours[1]["differing"] = 1
    assert oracle_speculation.problems(found) == ["stoker, batch 1, 3: 1 of 1 answers differ"]


def test_a_head_has_the_shape_of_its_target_and_shares_a_whole_vocabulary():
    head = head_config(SHAPES["llama8b"], 32_000)
    shapes = tensor_shapes(head)
    assert (head["eagle_aux_hidden_state_layer_ids"], head["draft_vocab_size"]) == ([2, 16, 29], 32_000)
    assert shapes["fc.weight"] == (4096, 3 * 4096)
    assert shapes["lm_head.weight"] == (32_000, 4096)
    assert "lm_head.weight" not in tensor_shapes(head_config(SHAPES["llama8b"], 10**9))
