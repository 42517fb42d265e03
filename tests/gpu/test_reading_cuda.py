"""Weights read directly onto a GPU equal the file's. Runs under pytest (-m gpu), or as a script without pytest."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

from safetensors.torch import save_file

from stoker.checkpoint.weight_files import WeightReadAhead, stored_tensors
from stoker.models.fill import Copy, fill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_values_find_their_place_on_the_gpu() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = {"a": (3, 5), "b": (1000, 70), "c": (1,), "d": (4096, 3000), "e": (70000, 129)}
    values = {name: torch.randn(size, generator=generator).to(torch.bfloat16) for name, size in sizes.items()}
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "model.safetensors"
        save_file(values, file)
        stored = stored_tensors(Path(name))
        for most_bytes, dtype in ((0, torch.bfloat16), (0, torch.float32), (1 << 30, torch.bfloat16)):
            with file.open("rb") as data:  # what is not in the page cache is read another way
                os.fsync(data.fileno())
                os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED if most_bytes else os.POSIX_FADV_WILLNEED)
            places = {n: torch.full(v.shape, float("nan"), dtype=dtype, device=DEVICE) for n, v in values.items()}
            if places["a"].is_cuda:
                torch.cuda.synchronize()
            copies = [Copy.of(stored[n], place) for n, place in places.items()]
            fill(copies, lambda done, total: None, WeightReadAhead([file], most_bytes))
            for n, value in values.items():
                assert torch.equal(places[n].cpu(), value.to(dtype)), (n, dtype, most_bytes)


if __name__ == "__main__":
    test_values_find_their_place_on_the_gpu()
    print("reading onto a card: ok")
