"""`stoker plan`: the arithmetic of whole models from their config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.support.hybrid_shapes import LLAMA_4_SCOUT
from stoker.base.errors import ConfigError
from stoker.cli.main import main
from stoker.planner.gpus import parse_gpus
from stoker.planner.layouts import LayoutPlan, PlannedLayout, plan_layouts
from tests.models.test_deepseek import KIMI_K25

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip


def only(plan: LayoutPlan, **wanted: int) -> PlannedLayout:
    [found] = [one for one in plan.layouts if all(getattr(one, name) == count for name, count in wanted.items())]
    return found


def test_kimi_k25_on_eight_h100() -> None:
    plan = plan_layouts(KIMI_K25, "kimi", parse_gpus("8xH100"))
    tp8, pp8 = only(plan, tp=8, pp=1, ep=1), only(plan, tp=1, pp=8)
    assert plan.picked is not None
    assert plan.layouts[plan.picked] == tp8, "the layout that serves on GPUs"
    assert 69 < tp8.weights_gib_per_gpu < 72
    assert tp8.kv_gib_total > 30
    assert 57_000 < tp8.kv_tokens < 90_000, "every rank holds the whole latent"
    assert pp8.kv_tokens > 3 * tp8.kv_tokens, "a stage holds the latent of its layers alone"
    assert "not yet served" in pp8.why
    assert "do not fit" in only(plan, tp=4, pp=1, ep=1).why


@pytest.mark.parametrize("context", [0, -5])
def test_a_context_without_tokens_is_refused(context: int) -> None:
    with pytest.raises(ConfigError, match="--context"):
        plan_layouts(LLAMA_8B, "8b", parse_gpus("1xH100"), context)


@pytest.mark.parametrize("text", ["[1]", "{", '{"a":' * 100_000])
def test_a_config_that_is_no_object_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["plan", str(tmp_path), "--gpus", "1xH100"]) != 0
    assert "config.json" in capsys.readouterr().err


def test_scout_needs_unbounded_kv_for_a_quarter_of_its_layers_only() -> None:
    scout = {**LLAMA_4_SCOUT, "num_hidden_layers": 48}
    plan = plan_layouts(scout, "scout", parse_gpus("2xH200"))
    pp2 = only(plan, tp=1, pp=2)
    assert pp2.fits
    assert pp2.kv_gib_total > 56
    assert pp2.kv_tokens > 700_000, "with 1 GiB per sequence for the layers with chunks, half of the memory at most"


def test_the_fastest_layout_that_is_served_is_picked() -> None:
    plan = plan_layouts(LLAMA_8B, "8b", parse_gpus("4xH100"))
    assert plan.picked is not None
    rates = [one.decode_tokens_per_s for one in plan.layouts if one.served]
    assert plan.layouts[plan.picked].decode_tokens_per_s == max(rates)
    alone = only(plan, tp=1, pp=1)
    assert alone.workers == 4
    assert 14.5 < alone.weights_gib_per_gpu < 15.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8 H100", "not COUNTxKIND"),
        ("8H100", "known are"),
        ("8xH999", "known are"),
        ("0xH100", "give 1 to"),
        ("8xH100,8xH200", "one kind"),
    ],
)
def test_wrong_gpus_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_gpus(text)


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["plan", str(tmp_path), "--gpus", "2xH100"]) == 0
    assert f" of: stoker serve {tmp_path}" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--gpus", "2xH100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    layout = found["layouts"][found["picked"]]
    assert {"tp", "pp", "ep", "cp", "fits", "weights_gib_per_gpu", "kv_gib_total", "kv_tokens", "why"} <= layout.keys()
    assert main(["plan", str(tmp_path), "--gpus", "1xRTX4090", "--context", "131072"]) == 1
