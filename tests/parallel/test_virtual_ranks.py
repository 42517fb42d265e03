"""Every family, split over ranks in all ways, gives the answers of one process; ranks are threads here."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.base.config import KvSettings, RankSettings
from stoker.base.errors import ConfigError
from stoker.engine.llm import LLM, LLMOutput
from stoker.engine.model_identity import read_hf_config
from stoker.layers.moe import MoeConfig
from stoker.models.decoder_family import DecoderFamily
from stoker.models.family import family_of
from stoker.sched.step_costs import StepCosts
from stoker.sched.step_size import StepSize
from tests.parallel.rank_cases import CANDIDATES, CHANGES, LAYOUTS, ParityGrammars, answers, requests, settings
from tests.parallel.virtual_ranks import VirtualRanks
from tests.tiny import SHAPES, make_tiny


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the number of drafts depends on how fast this machine is."""
    monkeypatch.setattr(StepSize, "costs", StepCosts())


def make_splittable(folder: Path, name: str) -> None:
    """Write the family's example, in sizes that ranks can split. Families have rules of their own for these."""
    # Every stage needs a layer of each kind of attention. One of four layers of Llama 4 sees all tokens.
    eight = {**CHANGES, "num_hidden_layers": 8}
    longer = [eight, {**eight, "no_rope_layers": [1, 0, 1, 1] * 2}] if name.startswith("llama4") else []
    for changes in longer + CANDIDATES:
        try:
            make_tiny(folder, name, torch.float64, **changes)
            family_of(read_hf_config(folder), name)
        except Exception:  # transformers checks its configurations with errors of its own
            continue
        return
    raise AssertionError(f"none of the sizes suits {name}")


def assert_same(got: list[LLMOutput], wanted: list[LLMOutput], cancelled: int | None = None) -> None:
    for number, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if number == cancelled:
            continue
        assert ours.token_ids == theirs.token_ids, number
        assert ours.finish == theirs.finish
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a.top_ids == b.top_ids
            assert math.isclose(a.logprob, b.logprob, abs_tol=1e-10)


# Layouts of every family. The other examples of an architecture differ in details that these two layouts reach.
ALL = ("tp2", "pp2", "tp2 pp2", "tp4", "ep2", "tp4 ep2", "tp2 cp2", "tp4 ep2 cp4")
SOME = ("tp2 pp2", "ep2")


def layouts_of(name: str, family: DecoderFamily) -> list[str]:
    architecture = SHAPES[name][0]
    is_first = next(one for one, (first, _) in SHAPES.items() if first == architecture) == name
    has_experts = any(isinstance(layer.mlp, MoeConfig) for layer in family.layers)
    is_latent = family.kv_groups[0].kind == "latent"
    return [
        one
        for one in (ALL if is_first else SOME)
        if (has_experts or "ep" not in one) and (is_latent or "cp" not in one)
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_give_the_answers_of_one_process(tmp_path: Path, name: str) -> None:
    make_splittable(tmp_path, name)
    asked, family = requests(1, 6), family_of(read_hf_config(tmp_path), name)
    assert isinstance(family, DecoderFamily)
    with closing(LLM(tmp_path, settings(), grammars=ParityGrammars())) as alone:
        wanted = answers(alone, asked)
    for layout in layouts_of(name, family):
        with closing(LLM(tmp_path, settings(LAYOUTS[layout]), grammars=ParityGrammars(), ranks=VirtualRanks())) as llm:
            assert_same(answers(llm, asked), wanted)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (RankSettings(2, 1, 1, 2), "cp=2: only latent attention .* can be split by context"),
        (RankSettings(4, 1, 1, 3), "cp=3 does not divide tp=4"),
    ],
)
def test_a_context_that_cannot_be_split_is_refused(tmp_path: Path, ranks: RankSettings, message: str) -> None:
    make_tiny(tmp_path, "llama", torch.float64, **CHANGES)
    with pytest.raises(ConfigError, match=message):
        LLM(tmp_path, settings(ranks), ranks=VirtualRanks())


def test_a_block_that_ranks_cannot_split_is_refused(tmp_path: Path) -> None:
    make_splittable(tmp_path, "deepseek")
    odd = replace(settings(RankSettings(2, 1, 1, 2)), kv=KvSettings(block_tokens=5, num_blocks=20))
    with pytest.raises(ConfigError, match=r"kv\.block_tokens=5 is not a multiple of cp=2; use --block-tokens 6"):
        LLM(tmp_path, odd, ranks=VirtualRanks())


def test_ranks_that_split_the_context_hold_more_tokens_in_the_same_memory(tmp_path: Path) -> None:
    make_splittable(tmp_path, "deepseek")
    pools = []
    for ranks in (RankSettings(4), RankSettings(4, 1, 1, 2), RankSettings(4, 1, 1, 4)):
        given = replace(settings(ranks), kv=KvSettings(block_tokens=8, memory_gib=0.001))
        with closing(LLM(tmp_path, given, ranks=VirtualRanks())) as llm:
            pools.append(llm.built.pool.num_blocks)
    assert pools[1:] == [pytest.approx(2 * pools[0], abs=1), pytest.approx(4 * pools[0], abs=3)]


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", "tp2"), ("llama", "pp2"), ("llama", "tp2 pp2"), ("deepseek", "tp4 cp2"), ("deepseek", "tp2 pp2 cp2")],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_drafts_preemptions_and_cancellations_change_no_answer(
    tmp_path: Path, name: str, layout: str, seed: int
) -> None:
    make_splittable(tmp_path, name)
    folder, asked = tmp_path, requests(2 + seed, 14)
    with closing(LLM(folder, settings(), grammars=ParityGrammars())) as alone:
        wanted = answers(alone, asked)
    tight = settings(LAYOUTS[layout], num_blocks=16, drafter="auto")
    with closing(LLM(folder, tight, grammars=ParityGrammars(), ranks=VirtualRanks())) as llm:
        assert_same(answers(llm, asked, seed, cancel="r5"), wanted, cancelled=5)
        counters = llm.built.scheduler.counters
        assert counters.preemptions
        assert counters.accepted_draft_tokens
        again = answers(llm, asked[:4])
        assert_same(again, wanted[:4])
        assert counters.cached_tokens


def test_fewer_kv_heads_than_ranks_are_held_several_times(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3", torch.float64, **{**CHANGES, "num_key_value_heads": 2})
    asked = requests(3, 5)
    with closing(LLM(tmp_path, settings(), grammars=ParityGrammars())) as alone:
        wanted = answers(alone, asked)
    with closing(LLM(tmp_path, settings(RankSettings(4)), grammars=ParityGrammars(), ranks=VirtualRanks())) as llm:
        assert_same(answers(llm, asked), wanted)


@pytest.mark.parametrize("name", ["gpt-oss", "llama4-scout"])
def test_layers_with_windows_and_chunks_are_split_and_preempted(name: str, tmp_path: Path) -> None:
    """Two stages of two ranks, with drafts, grammars and pools that are too small. Every stage has layers of each KV set."""
    make_tiny(tmp_path, name, torch.float64, **{**CHANGES, "num_hidden_layers": 8})
    asked = requests(2, 10)
    with closing(LLM(tmp_path, settings(), grammars=ParityGrammars())) as alone:
        wanted = answers(alone, asked)
    tight = settings(RankSettings(2, 2, 2), num_blocks=16, drafter="auto")
    with closing(LLM(tmp_path, tight, grammars=ParityGrammars(), ranks=VirtualRanks())) as llm:
        assert len(llm.built.layout.sets) == 2
        assert_same(answers(llm, asked, cancel="r5"), wanted, cancelled=5)
        assert llm.built.scheduler.counters.preemptions
        assert llm.built.scheduler.counters.accepted_draft_tokens
        assert_same(answers(llm, asked[:4]), wanted[:4])
