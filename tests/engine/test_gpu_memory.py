"""The memory plan, compared with numbers calculated by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import SHAPE

from stoker.base.config import EngineSettings, KvSettings, RankSettings, SchedSettings
from stoker.base.errors import ConfigError
from stoker.engine.gpu_memory import MemoryTable, WorkingMemory
from stoker.engine.kv_memory import blocks_per_set
from stoker.engine.memory import resolve
from stoker.kv.blocks.layout import KvGroup, KvLayout
from stoker.models.family import family_of

GIB, MIB = 1 << 30, 1 << 20
LLAMA_8B = {
    **SHAPE,
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
WHOLE_8B = {**LLAMA_8B, "num_hidden_layers": 32}
WHOLE_30B_A3B = {
    **WHOLE_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def test_a_token_of_the_8b_needs_the_residual_stream_and_the_mlp() -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = family_of(LLAMA_8B, "here").build(512)
    finally:
        torch.set_default_dtype(default)
    gate_up_and_gated, stream, angles = 3 * 14336 * 2, 2 * 4096 * 2, 2 * 128 * 4
    assert model.bytes_per_token == gate_up_and_gated + stream + angles


def test_working_memory_stays_below_3_gib_for_the_8b_shape() -> None:
    working = WorkingMemory.plan(8192, 2048, 512, 128256, 2, 103_424)
    assert working.reserve_bytes <= GIB // 2
    assert 8192 * 103_424 <= working.arena_bytes <= 8192 * 103_424 + 512 * 128256 * 2 + 64 * MIB
    assert working.total_bytes < 3 * GIB


def test_the_context_of_a_spare_engine_is_left_out_of_the_kv_cache() -> None:
    lone, beside_a_spare = (WorkingMemory.plan(8192, 2048, 512, 128256, 2, 103_424, keeps) for keeps in (False, True))
    assert beside_a_spare.total_bytes - lone.total_bytes == 640 * MIB
    shape = family_of(LLAMA_8B, "here").shape
    kept = [
        resolve(EngineSettings(device="cpu", spare_engine=value), shape).keeps_spare for value in (None, "on", "off")
    ]
    assert kept == [False, True, False]


def test_sampling_from_a_large_vocabulary_counts_if_steps_are_small() -> None:
    working = WorkingMemory.plan(64, 64, 64, 151936, 2, 1024)
    assert working.arena_bytes > 64 * 151936 * 4 * 4  # several copies of the logits in float32


@pytest.mark.parametrize("rows", [64, 512, 1024])
def test_there_is_memory_for_penalties_in_every_row(rows: int) -> None:
    working = WorkingMemory.plan(8192, 2048, rows, 151936, 2, 50_000)
    step, logits, tables = 8192 * 50_000, rows * 151936 * 2, rows * 151936 * (4 + 1)
    assert step + logits + tables <= working.arena_bytes + working.reserve_bytes // 2


def blocks_on_gpu(
    free_gib: float, kv: KvSettings, monkeypatch: pytest.MonkeyPatch, ranks: RankSettings | None = None
) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * GIB), 80 * GIB))
    settings = EngineSettings(device="cpu", kv=kv, ranks=ranks or RankSettings())
    resolved = replace(resolve(settings, family_of(LLAMA_8B, "here").shape), device=torch.device("cuda"))
    (blocks,) = blocks_per_set(settings, resolved, KvLayout.of(32, 8, 128, 64, "bfloat16", 2), WorkingMemory(GIB, GIB))
    return blocks


def test_kv_gets_the_rest_of_the_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks_on_gpu(12.5, KvSettings(), monkeypatch) == 10 * GIB // (8 * MIB)
    with pytest.raises(ConfigError, match=r"0\.00 GiB are left for KV"):
        blocks_on_gpu(2.4, KvSettings(), monkeypatch)


SCOUT = KvLayout((KvGroup(12, 8, 128), KvGroup(36, 8, 128, "chunk", 8192)), 64, "bfloat16", 2)
GPT_OSS = KvLayout((KvGroup(18, 8, 64), KvGroup(18, 8, 64, "window", 128)), 64, "bfloat16", 2)


def sets_on_gpu(kv_gib: float, layout: KvLayout, kv: KvSettings, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the blocks of each KV set with 512 rows, steps of 8192 tokens and one step ahead."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int((kv_gib + 2.5) * GIB), 200 * GIB))
    settings = EngineSettings(device="cpu", kv=kv, steps_ahead=1, sched=SchedSettings(step_tokens=8192, max_rows=512))
    resolved = resolve(settings, replace(family_of(LLAMA_8B, "here").shape, max_positions=1 << 20))
    resolved = replace(resolved, device=torch.device("cuda"), block_tokens=64)
    return blocks_per_set(settings, resolved, layout, WorkingMemory(GIB, GIB))


def test_bounded_layers_get_what_the_rows_can_hold_or_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    full, chunk = sets_on_gpu(78, SCOUT, KvSettings(), monkeypatch)
    assert full * 64 > 1_300_000, "a sequence of 131,072 tokens needs a seventh of its memory for its last chunk"
    assert chunk == pytest.approx(0.2 * 78 * GIB / (9 * MIB), abs=1)
    for mean in (8192, 32_768, 65_536):
        full, chunk = sets_on_gpu(78, SCOUT, KvSettings(mean_tokens=mean), monkeypatch)
        sequences = (chunk - 2 * 128) / 129
        assert full * 64 / mean == pytest.approx(sequences, rel=0.1), "both sets hold as many sequences"
        assert 0 <= 78 * GIB - full * 3 * MIB - chunk * 9 * MIB < 12 * MIB
    for_rows = 512 * 3 + 2 * 128  # the window of each row, and two steps
    full, window = sets_on_gpu(40, GPT_OSS, KvSettings(), monkeypatch)
    assert window == pytest.approx(for_rows + full / 8, abs=2)
    assert 0 <= 40 * GIB - (full + window) * GPT_OSS.sets[0].layout.block_bytes < 3 * GPT_OSS.sets[0].layout.block_bytes
    assert full * 64 > 1.6 * (40 * GIB // (36 * 2 * 8 * 64 * 2)), "more context than if all layers kept everything"


def test_too_little_memory_for_one_chunk_is_an_error_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"chunk8192 get 216 KV blocks \(1\.90 GiB\), but one sequence needs 258 blocks"
    ):
        sets_on_gpu(2, SCOUT, KvSettings(), monkeypatch)


def test_on_a_shared_gpu_kv_gets_the_rest_of_the_engines_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * GIB)  # the weights
    part = 15 + 10 + 2.5 + 640 / 1024
    assert blocks_on_gpu(60.0, KvSettings(gpu_memory_gib=part), monkeypatch) == 10 * GIB // (8 * MIB)
    assert blocks_on_gpu(12.5, KvSettings(gpu_memory_gib=40.0), monkeypatch) == 10 * GIB // (8 * MIB), (
        "limited by the free memory"
    )
    with pytest.raises(ConfigError, match=r"0\.00 GiB are left for KV"):
        blocks_on_gpu(60.0, KvSettings(gpu_memory_gib=18.0), monkeypatch)


def test_ranks_of_one_gpu_get_equal_parts_of_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * GIB)  # this rank's weights
    four = RankSettings(tp=4, per_gpu=4)
    assert blocks_on_gpu(4 * 12.5, KvSettings(), monkeypatch, four) == 10 * GIB // (8 * MIB)
    of_worker = KvSettings(gpu_memory_gib=4 * (15 + 10 + 2.5 + 640 / 1024))
    assert blocks_on_gpu(60.0, of_worker, monkeypatch, four) == 10 * GIB // (8 * MIB)


def test_the_memory_table_of_a_shared_gpu_counts_this_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = [0]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 80 * GIB))  # the other ranks allocate too
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    table = MemoryTable(torch.device("cuda"), 4)
    reserved[0] = 3 * GIB
    table.add_line("weights", 3 * GIB)
    table.add_reserve(GIB)
    assert [(line.name, line.used_bytes) for line in table.lines] == [
        ("context and others", 640 * MIB),
        ("weights", 3 * GIB),
        ("reserve", 17 * GIB - 640 * MIB),
    ]


def test_kv_that_leaves_no_working_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks_on_gpu(12.5, KvSettings(memory_gib=10.4), monkeypatch) == int(10.4 * GIB) // (
        8 * MIB
    )  # into the reserve
    for kv in (KvSettings(memory_gib=10.6), KvSettings(num_blocks=1400)):
        with pytest.raises(
            ConfigError, match=r"room for 10\.50 GiB: 12\.50 GiB of GPU memory are free, .* spare engine need 2\.00"
        ):
            blocks_on_gpu(12.5, kv, monkeypatch)


@pytest.mark.parametrize(
    ("hf", "settings", "expected"),
    [
        (WHOLE_8B, SchedSettings(), 2048),
        (WHOLE_30B_A3B, SchedSettings(), 4096),  # a token uses a tenth of its weights
        (WHOLE_8B, SchedSettings(step_tokens=1024), 1024),
    ],
)
def test_captured_tokens_follow_from_the_arithmetic_per_token(
    hf: dict[str, Any], settings: SchedSettings, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    shape = family_of(hf, "here").shape
    assert resolve(EngineSettings(device="cuda", sched=settings), shape).captured_tokens == expected


def test_active_weights_count_only_the_experts_of_a_token() -> None:
    for hf, all_weights, active in ((WHOLE_8B, 6.98e9, 6.98e9), (WHOLE_30B_A3B, 29.9e9, 2.72e9)):
        family = family_of(hf, "here")
        with torch.device("meta"):
            weights = dict(family.build(64).named_parameters())
        in_layers = sum(w.numel() for name, w in weights.items() if name.startswith("layers.") and w.dim() > 1)
        assert in_layers == pytest.approx(all_weights, rel=0.01)
        assert family.shape.active_weights == pytest.approx(active, rel=0.01)


def test_the_memory_table_is_empty_on_a_cpu() -> None:
    table = MemoryTable(torch.device("cpu"))
    table.add_line("weights", 5)
    table.take_arena(1 << 50)
    table.add_reserve(7)
    assert table.lines == []


def test_kv_in_ram_has_the_configured_size() -> None:
    settings = EngineSettings(device="cpu", kv=KvSettings(memory_gib=0.5), sched=SchedSettings(max_rows=4))
    resolved = resolve(settings, family_of(LLAMA_8B, "here").shape)
    layout = KvLayout.of(2, 8, 128, 16, "float32", 4)
    assert blocks_per_set(settings, resolved, layout, WorkingMemory(0, 0)) == [(GIB // 2) // layout.block_bytes]


def test_more_kv_than_ram_is_rejected() -> None:
    """Pages are allocated when first written, so the system would kill the engine later."""
    settings = EngineSettings(device="cpu", kv=KvSettings(memory_gib=1e6))
    layout = KvLayout.of(2, 2, 16, 16, "float32", 4)
    with pytest.raises(ConfigError, match=r"ask for 1000000\.00 GiB of KV"):
        blocks_per_set(settings, resolve(settings, family_of(LLAMA_8B, "here").shape), layout, WorkingMemory(0, 0))


def test_kv_in_ram_holds_the_whole_context_of_a_single_row() -> None:
    settings = EngineSettings(device="cpu", sched=SchedSettings(max_rows=1), max_model_tokens=100)
    resolved = resolve(settings, family_of(LLAMA_8B, "here").shape)
    layout = KvLayout.of(2, 8, 128, 16, "float32", 4)
    assert blocks_per_set(settings, resolved, layout, WorkingMemory(0, 0))[0] * layout.block_tokens >= 100
