"""What every registered model family must hold: strict weights, and the same answer however it is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import SHAPES, make_tiny

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.errors import ModelFilesError
from stoker.checkpoint.served import check_served
from stoker.engine.llm import LLM, LLMOutput
from stoker.models.family import MODELS, family_of
from stoker.sched.request import SamplingParams

Tensors = dict[str, torch.Tensor]

# Architecture -> tiny models of that architecture.
TINY = {arch: [name for name, (architecture, _) in SHAPES.items() if architecture == arch] for arch in MODELS}
NAMES = [name for names in TINY.values() for name in names]
TOLERANCE = 1e-4
NUM_NEW = 12


@pytest.fixture(params=NAMES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A tiny model's folder, and transformers' own model of it."""
    folder = tmp_path / "model"
    return folder, make_tiny(folder, request.param)


@pytest.fixture
def folder(made: tuple[Path, Any]) -> Path:
    return made[0]


def engine(folder: Path, step_tokens: int = 512, block_tokens: int = 8) -> LLM:
    sched, kv = SchedSettings(step_tokens, max_rows=4), KvSettings(block_tokens, num_blocks=64)
    return LLM(folder, EngineSettings(device="cpu", dtype="float32", num_threads=1, kv=kv, sched=sched))


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab_size, (count,), generator=generator).tolist() for count in (1, 8, 45)]


def answers(llm: LLM, num_new: int = NUM_NEW) -> list[LLMOutput]:
    """Greedy answers, with the log-probability of every token of the vocabulary at each step. The engine is closed
    afterwards."""
    vocab_size = llm.built.vocab_size
    sampling = SamplingParams(temperature=0.0, num_logprobs=vocab_size)
    with closing(llm):
        done = llm.generate(prompts(vocab_size), sampling, max_new_tokens=num_new)
    assert all(one.finish is not None and one.finish.reason == "length" for one in done)
    return done


def logprobs(answer: LLMOutput) -> torch.Tensor:
    """[steps, vocab], by token id."""
    rows = []
    for step in answer.logprobs:
        row = torch.empty(len(step.top_ids), dtype=torch.float64)
        row[torch.tensor(step.top_ids)] = torch.tensor(step.top_logprobs, dtype=torch.float64)
        rows.append(row)
    return torch.stack(rows)


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_every_family_has_an_example() -> None:
    assert [arch for arch, names in TINY.items() if not names] == [], "these families declare no examples"


@pytest.mark.parametrize("arch", list(MODELS))
def test_the_check_before_a_download_accepts_the_family(arch: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, TINY[arch][0])
    check_served(tmp_path / "config.json", arch)


def test_paged_is_dense(made: tuple[Path, Any]) -> None:
    """The prompt in blocks, then token by token, equals what transformers computes over the whole at once."""
    folder, reference = made
    llm = engine(folder)
    for prompt, answer in zip(prompts(llm.built.vocab_size), answers(llm), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.double().log_softmax(-1)
        assert (logprobs(answer) - expected).abs().max() < TOLERANCE
        assert answer.token_ids == expected.argmax(-1).tolist()


@pytest.mark.parametrize(("step_tokens", "block_tokens"), [(1, 8), (5, 8), (512, 1), (19, 16)])
def test_chunked_is_whole(folder: Path, step_tokens: int, block_tokens: int) -> None:
    for chunked, whole in zip(answers(engine(folder, step_tokens, block_tokens)), answers(engine(folder)), strict=True):
        assert chunked.token_ids == whole.token_ids
        assert (logprobs(chunked) - logprobs(whole)).abs().max() < TOLERANCE


def test_sharded_is_single(made: tuple[Path, Any], tmp_path: Path) -> None:
    folder, reference = made
    sharded = tmp_path / "sharded"
    reference.save_pretrained(sharded, max_shard_size="50KB")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    for one, other in zip(answers(engine(sharded)), answers(engine(folder)), strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(logprobs(one), logprobs(other))


def test_each_weight_has_one_place(folder: Path) -> None:
    family = family_of(json.loads((folder / "config.json").read_text()), str(folder))
    sources = [rule.source for rule in family.rules]
    assert len(set(sources)) == len(sources)
    assert set(sources) == set(load_file(folder / "model.safetensors")) - family.ignored
    assert not family.ignored & set(sources)
    places = [(rule.target, row) for rule in family.rules for row in range(rule.first, rule.first + (rule.count or 1))]
    assert len(set(places)) == len(places), "two tensors fill the same rows"


def test_each_weight_counts(folder: Path) -> None:
    """A tensor that is loaded but not used would go unnoticed until a model's answers are poor."""
    before = [logprobs(answer) for answer in answers(engine(folder), 6)]
    original = load_file(folder / "model.safetensors")
    for name, tensor in original.items():
        changed = tensor.clone()
        changed[: max(1, len(changed) // 2)] += 0.5
        save_file({**original, name: changed}, folder / "model.safetensors", {"format": "pt"})
        after = [logprobs(answer) for answer in answers(engine(folder), 6)]
        moved = max((one - other).abs().max() for one, other in zip(before, after, strict=True))
        assert moved > TOLERANCE, f"{name} changes nothing"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    original = load_file(folder / "model.safetensors")
    for name in original:
        save_file({n: t for n, t in original.items() if n != name}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelFilesError, match="missing") as refused:
            engine(folder)
        assert name in refused.value.message


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.spare.weight": torch.zeros(3)}))
    with pytest.raises(ModelFilesError, match=r"unexpected.*model\.layers\.0\.self_attn\.spare\.weight"):
        engine(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    original = load_file(folder / "model.safetensors")
    for name, tensor in original.items():
        wrong = torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])
        save_file({**original, name: wrong}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelFilesError) as refused:
            engine(folder)
        for part in (name, str(tuple(wrong.shape)), str(tuple(tensor.shape))):
            assert part in refused.value.message
