"""A rank's slices of checkpoint tensors: the right values, only the bytes that they need, and plans for large models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.engine.weight_plan import plan_large
from bench.support.large_checkpoint import make_large
from stoker.checkpoint import weight_files as files
from stoker.checkpoint.weight_files import stored_tensors
from stoker.models import fill as filling
from stoker.models.family import SourceSlice
from stoker.models.fill import Copy, fill

SLICES = [
    SourceSlice(0, 0, 5, 97),
    SourceSlice(0, 17, 20, 97),
    SourceSlice(1, 0, 3, 61),
    SourceSlice(1, 8, 33, 61),
    SourceSlice(1, 60, 1, 61),
]


def taken(value: torch.Tensor, cut: SourceSlice) -> torch.Tensor:
    return value.narrow(cut.axis, cut.first, cut.count)


@pytest.mark.parametrize("cut", SLICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_bytes", [4096, 8 << 20])
@pytest.mark.parametrize("cached", [True, False])
def test_a_slice_has_the_values_of_its_tensor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cut: SourceSlice,
    dtype: torch.dtype,
    block_bytes: int,
    cached: bool,
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(filling, "_GAP_BYTES", 64)
    if not cached:
        monkeypatch.setattr(files, "_is_resident", lambda fd, offset, length: False)
    value = torch.randn(97, 61, dtype=torch.bfloat16)
    stacked = torch.randn(3, 70, 31, dtype=torch.bfloat16)
    save_file({"a": torch.randn(7), "value": value, "stacked": stacked}, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)
    deep = SourceSlice(cut.axis + 1, cut.first % 20, min(cut.count, 11), stacked.shape[cut.axis + 1])
    wanted = [taken(value, cut), taken(stacked, deep), stacked.narrow(0, 1, 2)]
    places = [torch.full(one.shape, float("nan"), dtype=dtype) for one in wanted]
    cuts = [cut, deep, SourceSlice(0, 1, 2, 3)]
    names = ["value", "stacked", "stacked"]
    fill(
        [Copy.of(stored[name], place, one) for name, place, one in zip(names, places, cuts, strict=True)],
        lambda done, total: None,
    )
    for one, place in zip(wanted, places, strict=True):
        assert torch.equal(place, one.to(dtype))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_rank_reads_its_bytes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: int) -> None:
    """Four ranks of a tensor with long rows read each byte about once."""
    monkeypatch.setattr(files, "_is_resident", lambda fd, offset, length: False)
    value = torch.randn(8, 1 << 20).to(torch.bfloat16)
    save_file({"w": value}, tmp_path / "model.safetensors")
    stored, num_read = stored_tensors(tmp_path)["w"], 0
    real = filling.read_bytes

    def counting(file: Path, offset: int, into: memoryview) -> int:
        nonlocal num_read
        num_read += len(into)
        return real(file, offset, into)

    monkeypatch.setattr(filling, "read_bytes", counting)
    for rank in range(4):
        count = value.shape[axis] // 4
        cut = SourceSlice(axis, rank * count, count, 4 * count)
        place = torch.empty_like(taken(value, cut))
        fill([Copy.of(stored, place, cut)], lambda done, total: None)
        assert torch.equal(place, taken(value, cut))
    assert value.nbytes <= num_read < 1.05 * value.nbytes


def test_a_model_of_200_000_tensors_is_planned(tmp_path: Path) -> None:
    """`bench run weight_plan` measures how long it takes."""
    assert make_large(tmp_path) > 200_000
    assert plan_large(tmp_path) > 138_000
