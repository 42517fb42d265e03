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
from tests.models.test_deepseek import DEEPSEEK_V3, KIMI_K25

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
    tp8, pp8 = only(plan, tp=8, pp=1, ep=1, cp=1), only(plan, tp=1, pp=8)
    split = only(plan, tp=8, pp=1, ep=1, cp=8)
    assert plan.picked is not None
    assert plan.layouts[plan.picked] == split, "the fastest layout"
    assert 69 < tp8.weights_gib_per_gpu < 72
    assert tp8.kv_gib_total > 30
    assert tp8.kv_tokens / tp8.kv_gib_total * 30 == pytest.approx(57_300, rel=0.01), "every rank holds the whole latent"
    assert split.kv_gib_total > 30
    assert split.kv_tokens / split.kv_gib_total * 30 == pytest.approx(458_400, rel=0.01)
    assert split.kv_tokens > 458_000
    assert pp8.kv_tokens > 3 * tp8.kv_tokens, "a stage holds the latent of its layers alone"
    assert pp8.fits
    assert "do not fit" in only(plan, tp=4, pp=1, ep=1, cp=1).why
    assert (plan.vllm.tp, plan.vllm.pp, plan.vllm.fits) == (8, 1, False)


@pytest.fixture(scope="module")
def v3_on_eight_h200() -> LayoutPlan:
    return plan_layouts(DEEPSEEK_V3, "v3", parse_gpus("8xH200"))


def test_deepseek_v3_on_one_machine_and_on_two(v3_on_eight_h200: LayoutPlan) -> None:
    one = v3_on_eight_h200
    assert one.picked is not None
    assert (one.layouts[one.picked].tp, one.layouts[one.picked].cp) == (8, 8)
    assert (one.vllm.tp, one.vllm.pp, one.vllm.fits) == (8, 1, True)
    assert one.layouts[one.picked].kv_tokens > 8 * one.vllm.kv_tokens
    two = plan_layouts(DEEPSEEK_V3, "v3", parse_gpus("16xH100"))
    assert "do not fit" in only(two, tp=8, pp=1, ep=1, cp=1).why
    assert only(two, tp=8, pp=2, ep=1, cp=8).fits
    assert (two.vllm.tp, two.vllm.pp, two.vllm.fits) == (8, 2, True)


def test_a_split_context_holds_as_many_times_the_tokens(v3_on_eight_h200: LayoutPlan) -> None:
    plan = v3_on_eight_h200
    whole, split = only(plan, tp=8, pp=1, ep=1, cp=1), only(plan, tp=8, pp=1, ep=1, cp=8)
    assert split.kv_tokens / split.kv_gib_total == pytest.approx(8 * whole.kv_tokens / whole.kv_gib_total, rel=0.001)


def test_models_are_split_only_in_ways_that_they_have() -> None:
    plan = plan_layouts(LLAMA_8B, "8b", parse_gpus("4xH100"))
    assert {(one.ep, one.cp) for one in plan.layouts} == {(1, 1)}, "neither experts nor latent KV"


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
    ep2 = only(plan, tp=2, ep=2)
    assert pp2.kv_gib_total > 56 < ep2.kv_gib_total
    assert ep2.kv_tokens > 1_200_000 < pp2.kv_tokens + 10_000
    assert ep2.batch == 10, "the layers with chunks hold 1 GiB per sequence"
    short = only(plan_layouts(scout, "scout", parse_gpus("2xH200"), 32_768), tp=2, ep=2)
    assert short.batch > 2 * ep2.batch


def test_the_fastest_layout_is_picked() -> None:
    plan = plan_layouts(LLAMA_8B, "8b", parse_gpus("4xH100"))
    assert plan.picked is not None
    rates = [one.decode_tokens_per_s for one in plan.layouts]
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
    printed = capsys.readouterr().out
    assert f" of: stoker serve {tmp_path} --tp 2\n" in printed
    assert "vLLM's documented rule (tensor parallel size 1, pipeline parallel size 1, 92% of each GPU): " in printed
    assert main(["plan", str(tmp_path), "--gpus", "1xH100", "--context", "9000"]) == 0
    assert f" of: stoker serve {tmp_path} --kv-mean-tokens 9000\n" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--gpus", "2xH100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    layout = found["layouts"][found["picked"]]
    assert {"tp", "pp", "ep", "cp", "fits", "weights_gib_per_gpu", "kv_gib_total", "kv_tokens", "why"} <= layout.keys()
    assert main(["plan", str(tmp_path), "--gpus", "1xRTX4090", "--context", "131072"]) == 1
