"""The layer for drafts of a DeepSeek or GLM checkpoint: its guesses are those of a reference made of transformers' layers, and
drafts change no answer. EAGLE-3 heads draft for models with latent attention, too."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import test_speculation as speculation
import torch
from models.eagle3_files import FORMATS, LAYERS, make_tensors, write_head
from models.mtp_files import HIDDEN, make_mtp
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from torch import Tensor

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.errors import ModelFilesError
from stoker.base.ids import RequestId, Row
from stoker.engine.llm import LLM
from stoker.engine.model_identity import read_hf_config
from stoker.kernels.row_tokens import LENGTH, MODEL, MODEL_START
from stoker.models.family import family_of
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.train.evaluate import EveryDraft

drafts_cost_nothing = speculation.drafts_cost_nothing
NUM_LAYERS = 3
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[3, 14, 15, 92, 65], [35, 89, 79, 32, 38, 46, 26, 43], list(range(100, 130))]


class PlainPrediction:
    """The reference: a model with one layer more, of which the last one drafts."""

    def __init__(self, model: Any, extra: dict[str, Tensor]) -> None:
        self._model, self._extra = model, extra

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (HIDDEN,), self._extra[name], 1e-5)

    @torch.inference_mode()
    def draft(self, known: list[int], count: int) -> list[int]:
        model = self._model.model
        layers, model.layers = model.layers, model.layers[:NUM_LAYERS]
        features = model(torch.tensor([known[:-1]])).last_hidden_state[0]
        model.layers = layers
        following, guesses = known[1:], []
        for _ in range(count):
            embedded = self._norm("enorm.weight", model.embed_tokens(torch.tensor(following)))
            both = torch.cat([embedded, self._norm("hnorm.weight", features)], -1)
            x = (both @ self._extra["eh_proj.weight"].t())[None]
            positions = torch.arange(len(following))[None]
            mask = torch.full((len(following), len(following)), -torch.inf, dtype=x.dtype).triu(1)[None, None]
            angles = model.rotary_emb(x, positions)
            hidden = layers[NUM_LAYERS](x, attention_mask=mask, position_ids=positions, position_embeddings=angles)[0]
            hidden = hidden if hidden.dim() == 2 else hidden[0]
            normed = self._norm("shared_head.norm.weight", hidden)
            guesses.append(int(self._model.lm_head(normed[-1]).argmax()))
            features = torch.cat([features, normed[-1:]])
            following = [*following, guesses[-1]]
        return guesses


@pytest.fixture(scope="module", params=["deepseek", "glm4-moe"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlainPrediction]:
    """A model with a layer for drafts in its files, as DeepSeek-V3 and GLM-4.5 have it, and its reference."""
    folder = tmp_path_factory.mktemp("mtp")
    reference, extra = make_mtp(folder, NUM_LAYERS, request.param)
    return folder, PlainPrediction(reference, extra)


def settings(drafter: str) -> EngineSettings:
    return EngineSettings(
        device="cpu", dtype="float64", num_threads=1, drafter=drafter, kv=KvSettings(16, 64), sched=SchedSettings(64, 8)
    )


def test_guesses_are_those_of_the_reference(made: tuple[Path, PlainPrediction]) -> None:
    folder, plain = made
    prompt, compared = PROMPTS[2], 0
    with closing(LLM(folder, settings("mtp"), wrap_drafting=EveryDraft)) as llm:
        engine, rows = llm.built.engine, llm.built.engine._runner._rows
        known = list(prompt)
        engine.add(GenerateRequest(RequestId("r"), prompt, len(prompt), GREEDY, 10))
        while engine.has_work:
            known += [token for chunk in engine.step() for token in chunk.token_ids]
            table = rows.tokens[Row(0)]
            if len(known) == len(prompt) or table[LENGTH] != len(known):
                continue
            assert table[MODEL_START] == len(known)
            assert table[MODEL : MODEL + 2].tolist() == plain.draft(known, 2)
            compared += 1
    assert compared >= 3


def test_drafts_change_no_answer(made: tuple[Path, PlainPrediction]) -> None:
    folder, _ = made
    samplings = [GREEDY, SamplingParams(temperature=0.8, seed=3), SamplingParams(temperature=1.0, top_p=0.9, seed=4)]
    found = {}
    for drafter in ("off", "mtp", "mtp,ngram"):
        with closing(LLM(folder, settings(drafter))) as llm:
            requests = [
                GenerateRequest(RequestId(f"r{i}"), prompt, len(prompt), sampling, 24)
                for i, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
            ]
            found[drafter] = [answer.token_ids for answer in llm.run(requests)]
            if drafter == "mtp":
                assert llm.built.scheduler.counters.draft_tokens
                assert set(llm.built.draft_counts.by_source) == {"mtp"}
            assert llm.built.pool.num_free == llm.built.pool.num_blocks
    assert found["off"] == found["mtp"] == found["mtp,ngram"]


@pytest.mark.parametrize(("model", "name"), [("kimi-k2.5", "specforge"), ("deepseek", "vllm, MLA")])
def test_an_eagle3_head_drafts_for_latent_attention(model: str, name: str, tmp_path: Path) -> None:
    """With grouped-query attention or latent attention in the head, whose KV is a group of its own."""
    folder, head = tmp_path / "model", tmp_path / "head"
    make_tiny(folder, model, torch.float64, num_hidden_layers=LAYERS)
    form = FORMATS[name]
    write_head(head, form, make_tensors(form))
    found = []
    for drafter in ("off", f"eagle3:{head}"):
        with closing(LLM(folder, settings(drafter))) as llm:
            found.append([answer.token_ids for answer in llm.generate(PROMPTS, GREEDY, 16)])
            assert drafter == "off" or llm.built.scheduler.counters.draft_tokens
            assert llm.built.layout.groups == family_of(read_hf_config(folder), "").kv_groups
            assert llm.built.pool.num_free == llm.built.pool.num_blocks
    assert found[0] == found[1]


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path / "kimi", "kimi-k2")
    with pytest.raises(ModelFilesError, match="num_nextn_predict_layers"):
        LLM(tmp_path / "kimi", settings("mtp"))
    make_tiny(tmp_path / "llama", "llama")
    with pytest.raises(ModelFilesError, match="no layer for drafts"):
        LLM(tmp_path / "llama", settings("mtp"))
    make_tiny(tmp_path / "glm", "glm4-moe", num_nextn_predict_layers=0)
    with pytest.raises(ModelFilesError, match="num_nextn_predict_layers"):
        LLM(tmp_path / "glm", settings("mtp"))
    make_tiny(tmp_path / "minimax", "minimax-m2", num_mtp_modules=3)
    with pytest.raises(ModelFilesError, match=r"MiniMax-M2 is published without.*num_mtp_modules"):
        LLM(tmp_path / "minimax", settings("mtp"))
    make_tiny(tmp_path / "cut", "deepseek")
    with pytest.raises(ModelFilesError, match="eh_proj"):
        LLM(tmp_path / "cut", settings("mtp"))


def test_a_missing_tensor_of_the_layer_is_named(tmp_path: Path, made: tuple[Path, PlainPrediction]) -> None:
    name = f"model.layers.{NUM_LAYERS}.mlp.experts.2.down_proj.weight"
    tensors = load_file(made[0] / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made[0] / "config.json").read_text())
    with pytest.raises(ModelFilesError, match=name):
        LLM(tmp_path, settings("mtp"))
