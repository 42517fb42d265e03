"""Draft models with several ranks: every rank has the guesses of one process, and no answer changes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from models.eagle3_files import FORMATS, LAYERS, make_tensors, write_head
from models.mtp_files import make_mtp
from safetensors.torch import load_file, save_file

from stoker.base.ids import RequestId, Row
from stoker.engine.llm import LLM
from stoker.engine.ranks.rank_processes import RankProcesses
from stoker.engine.rows import RowTable
from stoker.kernels.row_tokens import LENGTH, MODEL, MODEL_START
from stoker.sched.draft_tape import MODEL_GUESSES
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.step_costs import StepCosts
from stoker.sched.step_size import StepSize
from tests.parallel.rank_cases import CHANGES, LAYOUTS, ParityGrammars, answers, requests, settings
from tests.parallel.virtual_ranks import VirtualRanks
from tests.tiny import make_tiny

GREEDY = SamplingParams(temperature=0.0)
PROMPT = list(range(100, 130))


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the number of drafts depends on how fast this machine is."""
    monkeypatch.setattr(StepSize, "costs", StepCosts())


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    make_tiny(folder, "llama", torch.float64, **{**CHANGES, "num_hidden_layers": LAYERS})
    return folder


@pytest.fixture
def drafter(request: pytest.FixtureRequest, dense: Path, tmp_path: Path) -> tuple[Path, str]:
    """The folder of a target model, and its drafter."""
    if request.param == "mtp":
        make_mtp(tmp_path, 4, num_attention_heads=8, num_key_value_heads=8)
        return tmp_path, "mtp"
    form = FORMATS[request.param]
    write_head(tmp_path, form, make_tensors(form))
    return dense, f"eagle3:{tmp_path}"


def guesses(llm: LLM, rows: RowTable) -> dict[int, list[int]]:
    """Generate one answer. Return the guesses in the row table, by the number of tokens before them."""
    engine, found, known = llm.built.engine, {}, list(PROMPT)
    engine.add(GenerateRequest(RequestId("r"), PROMPT, len(PROMPT), GREEDY, 12))
    while engine.has_work:
        known += [token for chunk in engine.step() for token in chunk.token_ids]
        table = rows.tokens[Row(0)]
        if len(known) > len(PROMPT) and table[LENGTH] == len(known) == table[MODEL_START]:
            found[len(known)] = table[MODEL : MODEL + MODEL_GUESSES].tolist()
    return found


CASES = [("sglang", "tp2 pp2"), ("vllm, norm before fc", "tp2"), ("mtp", "pp2"), ("mtp", "tp2 cp2")]
SLOW_CASES = [
    ("sglang", "tp2"),
    ("sglang", "pp2"),
    ("vllm, norm before fc", "tp2 pp2"),
    ("mtp", "tp2"),
    ("mtp", "tp2 pp2"),
]


@pytest.mark.parametrize(
    ("drafter", "layout"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],  # whose parts the others have
    indirect=["drafter"],
)
def test_ranks_guess_and_answer_like_one_process(drafter: tuple[Path, str], layout: str) -> None:
    folder, name = drafter
    asked = requests(2, 7)
    with closing(LLM(folder, settings(drafter=name), grammars=ParityGrammars())) as alone:
        expected = guesses(alone, alone.built.engine._runner._rows)  # type: ignore[attr-defined]
    with closing(LLM(folder, settings(), grammars=ParityGrammars())) as without:
        wanted = answers(without, asked)
    ranks, tight = VirtualRanks(), settings(LAYOUTS[layout], num_blocks=14, drafter=name)
    with closing(LLM(folder, tight, grammars=ParityGrammars(), ranks=ranks)) as llm:
        found = guesses(llm, llm.built.engine._runner._runner._rows)  # type: ignore[attr-defined]
        assert len(found) > 5
        assert {number: expected[number] for number in found} == found
        got = answers(llm, asked, cancel="r4")
        for number, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
            assert number == 4 or (ours.token_ids, ours.finish) == (theirs.token_ids, theirs.finish), number
        assert llm.built.scheduler.counters.draft_tokens
        assert llm.built.scheduler.counters.preemptions


@pytest.fixture(scope="module")
def constant(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose head is zero, so that it always writes one token, and a draft head that uses the model's."""
    folder, head = tmp_path_factory.mktemp("constant"), tmp_path_factory.mktemp("head")
    tensors = load_file(dense / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((dense / "config.json").read_text())
    form = next(one for one in FORMATS.values() if not one.own_head)
    write_head(head, form, make_tensors(form))
    return folder, head


@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.slow), "pp2"])
def test_accepted_drafts_save_steps_on_ranks(constant: tuple[Path, Path], layout: str) -> None:
    """Slow with `tp2`, where ranks are processes. They are threads with `pp2`."""
    folder, head = constant
    samplings = [GREEDY, SamplingParams(temperature=0.8, seed=3)]
    prompts = [PROMPT[:9], PROMPT]
    with closing(LLM(folder, settings(drafter="off"))) as llm:
        wanted = [answer.token_ids for answer in llm.generate(prompts, samplings, 30)]
    ranks = RankProcesses() if layout == "tp2" else VirtualRanks()
    with closing(LLM(folder, settings(LAYOUTS[layout], drafter=f"eagle3:{head}"), ranks=ranks)) as llm:
        assert [answer.token_ids for answer in llm.generate(prompts, samplings, 30)] == wanted
        counters = llm.built.scheduler.counters
        assert counters.accepted_draft_tokens > 0.5 * counters.generated_tokens
        assert llm.built.pool.num_free == llm.built.pool.num_blocks
