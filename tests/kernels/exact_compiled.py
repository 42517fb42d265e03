"""The kernels of numerics=exact are planned and compile for a Hopper GPU. Those of one weight use one instruction of its
tensor cores for all numbers of rows. test_exact_kernels.py starts this in a process of its own: in the others, kernels
are interpreted or absent."""

from __future__ import annotations

import sys

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels.hopper import SHARED_BYTES

from bench.support.model_shapes import SHAPES
from stoker.base.config import EngineSettings, KvSettings
from stoker.engine.kernel_plan import find_launches, make_stand_in
from stoker.engine.memory import resolve_on
from stoker.engine.part import kv_layout
from stoker.kernels.compiled.compile_ahead import KernelLaunch
from stoker.kernels.compiled.cross_compile import compile_for
from stoker.models.family import family_of

assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is not to be set"
compile_for(90)
# Kernels of numerics=fast that choose by the number of rows, or split keys by the batch.
FAST_ONLY = {"_one_row", "_dequantise", "join_tiles"}
MATMULS = (
    "_few_rows",
    "_many_rows",
    "_fp8_rows",
    "_many_fp8_rows",
    "_int4_rows",
    "_many_int4_rows",
    "_gate_up",
    "_down",
)


def exact_launches(name: str, kv_dtype: str = "auto") -> list[KernelLaunch]:
    family = family_of({**SHAPES[name], "num_hidden_layers": 2}, "config.json")
    settings = EngineSettings(numerics="exact", kv=KvSettings(dtype=kv_dtype))
    resolved = resolve_on(torch.device("cuda"), settings, family.shape)
    steps = make_stand_in(family, resolved, kv_layout(family, resolved))
    assert steps is not None
    return find_launches(steps, with_rest=True)


@pytest.mark.parametrize("name", ["llama8b", "qwen30a3b", "qwen235b-blocks", "qwen480b-int4"])
def test_no_kernel_depends_on_the_number_of_rows(name: str) -> None:
    splits: dict[tuple[str, int, int], set[int]] = {}
    for launch in exact_launches(name):
        kernel, options = launch.kernel.__name__, launch.options
        assert kernel not in FAST_ONLY
        assert not launch.kernel.__module__.endswith(("moe_few", "moe_prompt", "moe_quant_few"))
        if kernel == "_router_logits":
            splits.setdefault((kernel, 0, options["HIDDEN"]), set()).add(options["SPLITS"])
    assert all(len(found) == 1 for found in splits.values())


@pytest.mark.parametrize(
    ("name", "kv_dtype", "kernels"),
    [
        ("llama8b", "auto", ("_few_rows", "_many_rows", "_attend_single")),
        ("qwen30a3b", "auto", ("_router_logits",)),
        ("llama70b-fp8", "auto", ("_many_fp8_rows",)),
        ("llama70b-int4", "auto", ("_many_int4_rows",)),
        ("llama8b", "int8", ("attend_single_codes",)),
    ],
)
def test_a_weight_has_one_instruction_for_all_numbers_of_rows(
    name: str, kv_dtype: str, kernels: tuple[str, ...]
) -> None:
    launches = exact_launches(name, kv_dtype)
    for kernel in kernels:
        mine = [launch for launch in launches if launch.kernel.__name__ == kernel]
        mine.sort(key=lambda launch: (launch.options.get("ROWS", 0), launch.options.get("SPLITS", 1)))
        for launch in (mine[0], mine[-1]) if kernel == "_few_rows" else mine[-1:]:
            compiled = launch.compile()
            ptx, is_large = compiled.asm["ptx"], kernel in (*MATMULS, "_attend_tile", "attend_tile_codes")
            assert compiled.metadata.shared <= SHARED_BYTES, launch.options
            assert ("wgmma.mma_async" in ptx) == is_large, launch.options
            assert ("mma.sync." in ptx.replace("wgmma.mma_async.sync.", "")) == (not is_large), launch.options


def test_planning_does_not_load_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    exact_launches("llama8b")
    assert "torch._dynamo" not in sys.modules
