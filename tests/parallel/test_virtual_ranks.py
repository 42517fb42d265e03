"""Every family, split over ranks in all ways, gives the answers of one process; ranks are threads here."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
import torch

from stoker.base.config import RankSettings
from stoker.base.errors import ConfigError
from stoker.engine.llm import LLM, LLMOutput
from stoker.engine.model_identity import read_hf_config
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


def folder_of(folders: dict[str, Path], name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the family's example, in sizes that ranks can split. Families have rules of their own for these."""
    if name in folders:
        return folders[name]
    for changes in CANDIDATES:
        folder = tmp_path_factory.mktemp(name)
        try:
            make_tiny(folder, name, torch.float64, **changes)
            family_of(read_hf_config(folder), name)
        except Exception:  # transformers checks its configurations with errors of its own
            continue
        folders[name] = folder
        return folder
    pytest.skip("none of the sizes suits this family")


def assert_same(got: list[LLMOutput], wanted: list[LLMOutput], cancelled: int | None = None) -> None:
    for number, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if number == cancelled:
            continue
        assert ours.token_ids == theirs.token_ids, number
        assert ours.finish == theirs.finish
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a.top_ids == b.top_ids
            assert math.isclose(a.logprob, b.logprob, abs_tol=1e-10)


CASES = [
    (name, layout) for name in SHAPES for layout in ("tp2", "tp2 pp2", *(["ep2", "tp4 ep2"] if "moe" in name else []))
]
# What families accept that cannot be split in other ways.
CASES += [(name, layout) for name in ("gpt-oss", "llama4-scout") for layout in ("ep2", "pp2")] + [("minimax-m2", "pp2")]


@pytest.mark.parametrize(("name", "layout"), [*CASES, ("llama", "pp2"), ("llama", "tp4"), ("llama", "pp4")])
def test_ranks_give_the_answers_of_one_process(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, name: str, layout: str
) -> None:
    folder, asked = folder_of(folders, name, tmp_path_factory), requests(1, 6)
    with closing(LLM(folder, settings(), grammars=ParityGrammars())) as alone:
        wanted = answers(alone, asked)
    try:
        llm = LLM(folder, settings(LAYOUTS[layout]), grammars=ParityGrammars(), ranks=VirtualRanks())
    except ConfigError as refused:
        pytest.skip(refused.message)
    with closing(llm):
        assert_same(answers(llm, asked), wanted)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2 pp2"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_drafts_preemptions_and_cancellations_change_no_answer(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, layout: str, seed: int
) -> None:
    folder, asked = folder_of(folders, "llama", tmp_path_factory), requests(2 + seed, 14)
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
