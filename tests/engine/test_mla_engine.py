"""Latent attention with the real engine in float64: any schedule, hand-off, tier and drafter gives the tokens of a single
engine that computes everything once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import test_handoff_engine as handoff
import test_kv_dtypes as narrow
import test_local_sets as local_sets
import test_schedules as schedules
import test_speculation as speculation
import torch
from tiny import make_tiny

from stoker.base.config import EngineSettings, KvSettings
from stoker.engine.build import build_engine

# Fixtures of those modules, for the tests that are called from here.
patient, drafts_cost_nothing = handoff.patient, speculation.drafts_cost_nothing
asked = narrow.asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path, "deepseek", torch.float64)
    return path


def test_any_schedule_gives_the_tokens_of_running_alone(folder: Path) -> None:
    """With preemption, prefix hits, chunks of prompts and drafts."""
    schedules.test_any_schedule_gives_the_tokens_of_running_alone(folder, 1)


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_hand_off(folder: Path, transport: str) -> None:
    handoff.test_prefill_and_decode_give_the_unified_answer_and_decode_computes_no_prompt(folder, transport)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_tiers(folder: Path, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = handoff.test_a_prefix_computed_by_one_worker_is_found_by_another_through_the_store
    check(folder, tier, tmp_path, monkeypatch)


def test_speculation(folder: Path) -> None:
    speculation.test_drafts_change_no_answer_and_return_every_block(folder, "cache", 18, 16, 1)


def test_resume(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another worker, at the first and at a later token, with and without the blocks of the first worker."""
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 199) for _ in range(length)] for length in local_sets.LENGTHS]
    model = local_sets.TinyModel(folder, prompts, [])
    local_sets.test_an_answer_is_resumed_on_another_worker(model, tmp_path, monkeypatch)


def test_the_cache_holds_one_entry_per_token_and_layer(folder: Path) -> None:
    built = build_engine(folder, EngineSettings(device="cpu", dtype="float32", kv=KvSettings(8, 64)))
    entry = 32 + 16  # the latent and the rotated key
    assert built.layout.block_bytes == 3 * 8 * entry * 4
    assert built.layout.identity == "kv1:float32:latent-3x1x1x8x48"


@pytest.fixture(scope="module")
def narrow_answers(folder: Path, asked: list[list[int]]) -> dict[str, list[list[int]]]:
    """Return the answers with 8-bit entries, computed one request at a time."""
    found = {}
    for kv_dtype in ("int8", "fp8_e4m3"):
        with narrow.engine(folder, kv_dtype) as llm:
            found[kv_dtype] = [
                llm.generate([prompt], narrow.GREEDY, narrow.NEW_TOKENS)[0].token_ids for prompt in asked
            ]
    return found


@pytest.mark.parametrize(("num_blocks", "step_tokens"), [(80, 512), (18, 24)])
def test_any_schedule_over_8_bit_entries(
    folder: Path, asked: list[list[int]], narrow_answers: dict[str, list[list[int]]], num_blocks: int, step_tokens: int
) -> None:
    check = narrow.test_the_schedule_does_not_change_the_answers
    check(folder, asked, narrow_answers, "fp8_e4m3", num_blocks, step_tokens)


def test_hand_off_of_8_bit_entries(
    folder: Path, asked: list[list[int]], narrow_answers: dict[str, list[list[int]]]
) -> None:
    narrow.test_prefill_and_decode_give_the_unified_answer(folder, asked, narrow_answers, "fp8_e4m3", "tcp")


def test_tiers_of_8_bit_entries(
    folder: Path,
    asked: list[list[int]],
    narrow_answers: dict[str, list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = narrow.test_blocks_in_a_tier_are_found_by_workers_of_the_same_type_only
    check(folder, asked, narrow_answers, tmp_path, monkeypatch)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_8_bit_entries_keep_16_bits_for_the_rotated_key(folder: Path, kv_dtype: str) -> None:
    built = build_engine(folder, EngineSettings(device="cpu", dtype="float32", kv=KvSettings(8, 64, dtype=kv_dtype)))
    assert built.layout.block_bytes == 3 * 8 * (32 + 2 * 16 + 2)
    assert built.layout.identity.endswith(":latent16-3x1x1x8x48")
