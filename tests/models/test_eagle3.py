"""EAGLE-3 heads: each public format gives the logits of an independent reference, and bad checkpoints are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models.eagle3_files import (
    DRAFT_VOCAB,
    FORMATS,
    LAYERS,
    VOCAB,
    Format,
    PlainHead,
    make_tensors,
    read_config_file,
    write_head,
)
from tiny import make_tiny
from torch import Tensor

from stoker.base.config import EngineSettings, KvSettings
from stoker.base.errors import ModelFilesError
from stoker.base.ids import BlockId, Row
from stoker.engine.build import BuiltEngine, build_engine
from stoker.engine.grammar import NoGrammars
from stoker.engine.inputs import build_inputs
from stoker.engine.model_identity import read_hf_config
from stoker.engine.rows import RowTable
from stoker.kv.blocks.layout import KvGroup
from stoker.kv.device.device_kv import DeviceKv
from stoker.models.eagle3 import Eagle3Head
from stoker.models.eagle3_weights import Eagle3Checkpoint
from stoker.models.family import family_of
from stoker.sched.plan import BlockTableChange, NewRow, Span, StepPlan
from stoker.sched.request import SamplingParams

CPU = torch.device("cpu")
BLOCK = 16
NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BuiltEngine, Any]:
    """A tiny target model: its folder, our engine in float64, and transformers' model."""
    folder = tmp_path_factory.mktemp("target")
    reference = make_tiny(folder, "llama", torch.float64, num_hidden_layers=LAYERS)
    settings = EngineSettings(device="cpu", dtype="float64", num_threads=1, kv=KvSettings(BLOCK, 8))
    return folder, build_engine(folder, settings), reference


def load_head(target: tuple[Path, BuiltEngine, Any], folder: Path, form: Format | None = None) -> Eagle3Head:
    shape = family_of(read_hf_config(target[0]), "target").shape
    checkpoint = Eagle3Checkpoint(read_hf_config(folder), folder, shape)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        head = checkpoint.build(target[1].model, 128)  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(default)
    checkpoint.load(head, lambda done, total: None)
    with torch.no_grad():
        head.pack()
    assert form is None or checkpoint.kv_group == form.kv_group
    return head


class Paged:
    """Runs the target model and a head over one sequence, through paged KV with blocks in odd places."""

    def __init__(self, built: BuiltEngine, head: Eagle3Head, group: KvGroup) -> None:
        self._model, self._head = built.model, head
        self._kv = DeviceKv(built.layout, 16, CPU, draft=group)
        self._kv.blocks.fill_(float("nan"))
        assert self._kv.draft is not None
        self._kv.draft.all_pages.fill_(float("nan"))
        blocks = [BlockId(number) for number in (5, 2, 11, 7, 1, 13)]
        self._kv.clear(blocks)
        self._rows = RowTable(2, len(blocks), VOCAB, CPU, NoGrammars())
        row = NewRow(Row(1), SamplingParams(), [0], 1, 1)
        self._rows.apply(StepPlan([], [], new_rows=[row], block_table_changes=[BlockTableChange(Row(1), 0, blocks)]))

    @torch.inference_mode()
    def step(self, token_ids: list[int], start: int, next_id: int) -> Tensor:
        """Compute tokens with both models. Returns the head's hidden states."""
        batch = build_inputs(
            StepPlan([Span(Row(1), start, len(token_ids), False)], token_ids), self._rows, self._kv
        ).batch
        features = self._head.features()
        self._model(batch, features.taps)
        assert batch.draft is not None
        return self._head(torch.tensor([*token_ids[1:], next_id]), features.value(), batch.positions, batch.draft)

    @torch.inference_mode()
    def continue_alone(self, token_id: int, features: Tensor, position: int) -> Tensor:
        batch = build_inputs(StepPlan([Span(Row(1), position, 1, False)], [token_id]), self._rows, self._kv).batch
        assert batch.draft is not None
        return self._head(torch.tensor([token_id]), features, batch.positions, batch.draft)


@pytest.mark.parametrize("name", FORMATS)
def test_drafts_of_each_format_are_those_of_the_plain_reference(
    name: str, target: tuple[Path, BuiltEngine, Any], tmp_path: Path
) -> None:
    form = FORMATS[name]
    tensors = make_tensors(form)
    write_head(tmp_path, form, tensors)
    _folder, built, reference = target
    head = load_head(target, tmp_path, form)
    token_ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        hidden = reference(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        plain = PlainHead(form, tensors, reference.model.embed_tokens.weight, reference.lm_head.weight)
        features = plain.features({layer: hidden[layer][0] for layer in form.taps})
        expected, expected_logits = plain.draft(
            token_ids, features, NUM_DRAFTS, lambda logits, position: int(logits.argmax())
        )
    paged = Paged(built, head, form.kv_group)
    for start in range(0, 39, 13):  # as a prompt in three parts
        out = paged.step(token_ids[start : start + 13], start, token_ids[start + 13])[-1:]
    drafts, found_logits = [], []
    for number in range(NUM_DRAFTS):
        found_logits.append(head.logits(out)[0])
        drafts.append(int(found_logits[-1].argmax()))
        out = paged.continue_alone(drafts[-1], head.feedback(out), 39 + number)
    assert drafts == expected
    assert torch.equal(torch.stack(found_logits).isinf(), expected_logits.isinf())
    finite = expected_logits.isfinite()
    # Rotary angles are computed in float32 here.
    assert (torch.stack(found_logits)[finite] - expected_logits[finite]).abs().max() < 1e-5
    assert finite[0].sum() == (form.draft_vocab or VOCAB)


def test_a_copy_of_the_target_models_embedding_is_not_kept(
    target: tuple[Path, BuiltEngine, Any], tmp_path: Path
) -> None:
    form = FORMATS["specforge"]
    tensors = make_tensors(form)
    for name, embedding in (("own", tensors["embed_tokens.weight"]), ("copy", target[2].model.embed_tokens.weight)):
        write_head(tmp_path / name, form, {**tensors, "embed_tokens.weight": embedding.detach()})
    assert load_head(target, tmp_path / "own").embedding is not None
    assert load_head(target, tmp_path / "copy").embedding is None


def test_taps_leave_the_target_model_as_it_is(target: tuple[Path, BuiltEngine, Any], tmp_path: Path) -> None:
    form = FORMATS["specforge"]
    write_head(tmp_path, form, make_tensors(form))
    built, head = target[1], load_head(target, tmp_path)
    hidden = []
    for taps in ((), head.features().taps):
        kv = DeviceKv(built.layout, 4, CPU)
        rows = RowTable(1, 2, VOCAB, CPU, NoGrammars())
        rows.apply(StepPlan([], [], block_table_changes=[BlockTableChange(Row(0), 0, [BlockId(3), BlockId(1)])]))
        with torch.inference_mode():
            batch = build_inputs(StepPlan([Span(Row(0), 0, 20, False)], list(range(20))), rows, kv).batch
            assert batch.draft is None
            hidden.append(built.model(batch, taps))
    assert torch.equal(*hidden)


def without(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def shifted(tensors: Mapping[str, Tensor], draft_id: int, by: int) -> Tensor:
    d2t = tensors["d2t"].clone()
    d2t[draft_id] += by
    return d2t


BAD_CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "hidden size": ("eagle", {"hidden_size": 64}, r"hidden_size is 64, and that of the target model is 72"),
    "target hidden size": ("specforge", {"target_hidden_size": 80}, r"target_hidden_size is 80"),
    "vocabulary": ("specforge", {"vocab_size": 200}, r"vocab_size is 200, and that of the target model is 199"),
    "draft vocabulary": ("specforge", {"draft_vocab_size": 300}, r"draft_vocab_size 300 is more"),
    "tap out of range": (
        "specforge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}}, r"layer_ids is \[1, 4, 8\]",
    ),
    "negative tap": ("speculators", {"eagle_aux_hidden_state_layer_ids": [-1, 4, 6]}, r"\[-1, 4, 6\]"),
    "repeated tap": ("speculators", {"eagle_aux_hidden_state_layer_ids": [4, 4, 6]}, r"different layers"),
    "taps of another type": ("speculators", {"eagle_aux_hidden_state_layer_ids": "1,2"}, r"eagle_aux_hidden_state"),
    "number of taps": ("specforge", {"num_aux_hidden_states": 4}, r"num_aux_hidden_states is 4"),
    "several layers": ("specforge", {"num_hidden_layers": 2}, r"num_hidden_layers is 2"),
    "both norms": ("specforge", {"fc_norm": True, "norm_before_fc": True}, r"norm_before_fc and fc_norm"),
    "no features": ("specforge", {"eagle_config": {"use_aux_hidden_state": False}}, r"use_aux_hidden_state"),
    "flag of another type": ("specforge", {"norm_output": "yes"}, r"'norm_output' must be bool"),
    "quantised": ("specforge", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config"),
    "layer type": ("vllm, MLA", {"model_type": "mamba"}, r"model_type 'mamba'.*deepseek_v3"),
    "no latent": ("vllm, MLA", {"kv_lora_rank": None}, r"'kv_lora_rank'"),
    "latent of another type": ("vllm, MLA", {"v_head_dim": "10"}, r"'v_head_dim' must be int"),
    "odd rotation": ("vllm, MLA", {"qk_rope_head_dim": 7}, r"qk_rope_head_dim 7 is odd"),
    "heads of k and v": ("vllm, MLA", {"num_key_value_heads": 2}, r"num_key_value_heads is 2"),
    "sparse attention": ("vllm, MLA", {"index_topk": 64}, r"\(index_topk\)"),
    "MLA for another model": ("vllm, MLA", {"vocab_size": 200}, r"vocab_size is 200"),
    "a whole model": ("eagle", {"draft_vocab_size": None}, r"no EAGLE-3 draft head"),
    "another drafter": ("speculators", {"speculators_model_type": "dflash"}, r"'dflash'"),
    "no layer": ("speculators", {"transformer_layer_config": None}, r"transformer_layer_config"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_does_not_fit_is_refused_by_the_field(
    name: str, target: tuple[Path, BuiltEngine, Any], tmp_path: Path
) -> None:
    kind, changes, named = BAD_CONFIGS[name]
    write_head(tmp_path, FORMATS[kind], make_tensors(FORMATS[kind]), changes)
    with pytest.raises(ModelFilesError, match=named):
        load_head(target, tmp_path)


T = make_tensors(FORMATS["specforge"])
BAD_TENSORS: dict[str, tuple[Mapping[str, Tensor], str]] = {
    "missing": (without(T, "layers.0.self_attn.k_proj.weight"), r"1 missing, first .*self_attn.k_proj.weight"),
    "missing norm": (without(T, "layers.0.hidden_norm.weight"), r"missing, first .*hidden_norm.weight"),
    "missing d2t": (without(T, "d2t"), r"missing, first d2t"),
    "missing head": (without(T, "lm_head.weight"), r"lm_head.weight.*draft_vocab_size is 50"),
    "extra": ({**T, "mask_hidden": torch.zeros(72)}, r"1 unexpected, first mask_hidden"),
    "extra bias": ({**T, "fc.bias": torch.zeros(72)}, r"unexpected, first fc.bias"),
    "norms that are not configured": ({**T, "fc_norm.0.weight": torch.zeros(72)}, r"unexpected, first fc_norm.0"),
    "two names": ({**T, "model.norm.weight": torch.zeros(72)}, r"norm.weight' are the same part"),
    "fc of two features": ({**T, "fc.weight": torch.zeros(72, 144)}, r"'fc.weight' is \(72, 144\)"),
    "head of another vocabulary": ({**T, "lm_head.weight": torch.zeros(60, 72)}, r"'lm_head.weight' is \(60, 72\)"),
    "d2t of another vocabulary": ({**T, "d2t": torch.zeros(60, dtype=torch.int64)}, r"'d2t' is \(60,\)"),
    "d2t out of range": ({**T, "d2t": shifted(T, 7, 1000)}, r"'d2t': draft token 7 .* has 199"),
    "d2t below zero": ({**T, "d2t": shifted(T, 0, -500)}, r"'d2t': draft token 0 .* token -"),
    "d2t repeats": ({**T, "d2t": -torch.arange(DRAFT_VOCAB)}, r"'d2t': 50 draft tokens are only 1"),
    "d2t of another type": ({**T, "d2t": T["d2t"].double()}, r"'d2t' is F64"),
    "t2d of another vocabulary": ({**T, "t2d": torch.zeros(200, dtype=torch.bool)}, r"'t2d' is \(200,\)"),
}  # fmt: skip


MLA = make_tensors(FORMATS["vllm, MLA"])
LATENT = "layers.0.self_attn.kv_a_proj_with_mqa.weight"
BAD_LATENTS: dict[str, tuple[Mapping[str, Tensor], str]] = {
    "missing": (without(MLA, LATENT), r"1 missing, first .*self_attn.kv_a_proj_with_mqa.weight"),
    "of one input": ({**MLA, LATENT: torch.zeros(48, 72)}, r"kv_a_proj_with_mqa.weight' is \(48, 72\)"),
    "of another rank": ({**MLA, LATENT: torch.zeros(40, 144)}, r"kv_a_proj_with_mqa.weight' is \(40, 144\)"),
    "of GQA": ({**MLA, "layers.0.self_attn.k_proj.weight": torch.zeros(32, 144)}, r"unexpected, first .*k_proj.weight"),
}


@pytest.mark.parametrize("name", BAD_LATENTS)
def test_latent_weights_that_do_not_fit_are_refused_by_the_tensor(
    name: str, target: tuple[Path, BuiltEngine, Any], tmp_path: Path
) -> None:
    tensors, named = BAD_LATENTS[name]
    write_head(tmp_path, FORMATS["vllm, MLA"], tensors)
    with pytest.raises(ModelFilesError, match=named):
        load_head(target, tmp_path)


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_weights_that_do_not_fit_are_refused_by_the_tensor(
    name: str, target: tuple[Path, BuiltEngine, Any], tmp_path: Path
) -> None:
    tensors, named = BAD_TENSORS[name]
    write_head(tmp_path, FORMATS["specforge"], tensors)
    with pytest.raises(ModelFilesError, match=named):
        load_head(target, tmp_path)


def test_a_head_of_another_hidden_size_needs_its_own_embedding(
    target: tuple[Path, BuiltEngine, Any], tmp_path: Path
) -> None:
    form = FORMATS["eagle, another hidden size"]
    write_head(tmp_path, form, without(make_tensors(form), "embed_tokens.weight"))
    with pytest.raises(ModelFilesError, match=r"'embed_tokens.weight' is missing.*72.*48"):
        load_head(target, tmp_path)


def test_a_d2t_over_the_whole_vocabulary_must_not_move_tokens(
    target: tuple[Path, BuiltEngine, Any], tmp_path: Path
) -> None:
    form = FORMATS["sglang"]
    for name, shift in (("same", 0), ("moved", 1)):
        d2t = torch.full((VOCAB,), shift, dtype=torch.int64)
        write_head(tmp_path / name, form, {**make_tensors(form), "d2t": d2t})
    load_head(target, tmp_path / "same")
    with pytest.raises(ModelFilesError, match="'d2t' moves tokens"):
        load_head(target, tmp_path / "moved")


def test_a_truncated_file_is_refused_by_its_name(target: tuple[Path, BuiltEngine, Any], tmp_path: Path) -> None:
    form = FORMATS["specforge"]
    write_head(tmp_path, form, make_tensors(form))
    file = tmp_path / "model.safetensors"
    for size in (0, 4, 200, file.stat().st_size - 1):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ModelFilesError, match=r"model\.safetensors"):
            load_head(target, tmp_path)
        write_head(tmp_path, form, make_tensors(form))


def test_a_draft_head_is_no_model_to_serve(tmp_path: Path) -> None:
    form = FORMATS["specforge"]
    write_head(tmp_path, form, make_tensors(form))
    with pytest.raises(ModelFilesError, match="LlamaForCausalLMEagle3"):
        family_of(read_config_file(tmp_path), "config.json")
