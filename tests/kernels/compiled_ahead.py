"""Kernels are planned and compiled for a Hopper GPU without one. test_compile_ahead.py starts this in a process of its own: in
the others, kernels are interpreted or absent."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined

# isort: split
import tiny
from models.eagle3_files import FORMATS, make_tensors, write_head

from bench.support.model_shapes import SHAPES
from stoker.base.config import EngineSettings
from stoker.engine.draft_model import open_draft
from stoker.engine.gpu_steps import DeviceSteps
from stoker.engine.kernel_plan import find_launches, make_stand_in
from stoker.engine.memory import resolve_on
from stoker.engine.model_identity import read_hf_config
from stoker.engine.part import kv_layout
from stoker.kernels.compiled.compile_ahead import KernelLaunch, compile_all, recorded_launches
from stoker.kernels.compiled.cross_compile import compile_for
from stoker.kernels.compiled.kernel_archive import KernelArchive, Manifest, write_archive
from stoker.kernels.compiled.kernel_cache import KernelCache, install, name_in_archive
from stoker.models.family import family_of

assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is not to be set"
compile_for(90)
QUICK = ("_step_inputs", "_rms_norm")  # kernels that compile in a moment


def stand_in(config: dict[str, Any]) -> DeviceSteps:
    family = family_of(config, "config.json")
    resolved = resolve_on(torch.device("cuda"), EngineSettings(), family.shape)
    steps = make_stand_in(family, resolved, kv_layout(family, resolved))
    assert steps is not None
    return steps


LARGE = {name: {**config, "num_hidden_layers": 2} for name, config in SHAPES.items()}
CONFIGS = LARGE | {name: tiny.config_of(name) for name in tiny.SHAPES}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_is_planned_without_torchs_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # transformers imports it
    config = dict(CONFIGS[name])
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1
    launches = find_launches(stand_in(config), with_rest=False)
    names = {launch.kernel.__name__ for launch in launches}
    is_latent = "kv_lora_rank" in config.get("text_config", config)
    attention = {"_latent_write", "_attend_latent"} if is_latent else {"_rope_write", "_attend_single", "_attend_tile"}
    assert {"_step_inputs", "_pick_tokens"} | attention <= names
    assert "torch._dynamo" not in sys.modules


def test_a_draft_model_is_planned_and_its_kernels_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMATS["specforge 3.1"]
    write_head(tmp_path, form, make_tensors(form))
    family = family_of({**tiny.SHAPE, "num_hidden_layers": 8, "architectures": ["LlamaForCausalLM"]}, "config.json")
    resolved = resolve_on(torch.device("cuda"), EngineSettings(drafter=f"eagle3:{tmp_path}"), family.shape)
    checkpoint = open_draft(tmp_path, read_hf_config(tmp_path), family)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    steps = make_stand_in(family, resolved, kv_layout(family, resolved), checkpoint)
    assert steps is not None
    launches = find_launches(steps, with_rest=False)
    assert "torch._dynamo" not in sys.modules
    small = ("_step_inputs", "_next_tokens", "_put_sampled", "_draft_rows", "_draft_step", "_put_draft")
    quick = {launch.kernel.__name__: launch for launch in launches if launch.kernel.__name__ in small}
    assert set(quick) == set(small)
    install(KernelCache(tmp_path / "cache", [], lambda what, where, why: None))
    assert compile_all(list(quick.values()), 2, lambda kernel: None) == []


@pytest.mark.parametrize("name", ["gptoss120b", "scout"])
def test_the_kernels_of_local_layers_compile(name: str, tmp_path: Path) -> None:
    launches = find_launches(stand_in({**SHAPES[name], "num_hidden_layers": 4}), with_rest=False)
    local = [one for one in launches if "CHUNK" in one.options and one.options["WINDOW"] + one.options["CHUNK"]]
    by_name = {launch.kernel.__name__: launch for launch in local}
    assert set(by_name) == {"_attend_single", "_attend_tile", "join_tiles"}
    install(KernelCache(tmp_path, [], lambda what, where, why: None))
    assert compile_all(list(by_name.values()), 2, lambda kernel: None) == []


def quick_launches() -> list[KernelLaunch]:
    launches = find_launches(stand_in(LARGE["llama8b"]), with_rest=False)
    return [launch for launch in launches if launch.kernel.__name__ in QUICK]


def test_kernels_are_compiled_once_and_then_read(tmp_path: Path) -> None:
    faults: list[str] = []
    launches = quick_launches()
    assert len(launches) == len(QUICK)

    def compile_with(folder: Path, archives: list[KernelArchive]) -> KernelCache:
        cache = KernelCache(folder, archives, lambda what, where, why: faults.append(what))
        triton.knobs.cache.manager_class = None
        install(cache)
        for launch in launches:
            launch.kernel.device_caches.clear()  # as in a new process
        assert compile_all(launches, 2, lambda kernel: None) == []
        return cache

    first = compile_with(tmp_path / "first", [])
    assert (first.counts.compiled, first.counts.from_folder, first.counts.from_archive) == (2, 0, 0)
    again = compile_with(tmp_path / "first", [])
    assert (again.counts.compiled, again.counts.from_folder, again.counts.from_archive) == (0, 2, 0)
    named = [(name_in_archive(path), path.read_bytes()) for path in (tmp_path / "first").glob("*/*")]
    members = [(name, data) for name, data in named if name is not None]
    write_archive(tmp_path / "kernels.zip", Manifest(90, triton.__version__, "", []), members)
    packed = compile_with(tmp_path / "second", [KernelArchive(tmp_path / "kernels.zip")])
    assert (packed.counts.compiled, packed.counts.from_folder, packed.counts.from_archive) == (0, 0, 2)
    assert faults == []
    assert not any(str(Path(__file__).parents[2]).encode() in data for name, data in members if name.endswith(".cubin"))


def test_other_threads_launch_while_one_records() -> None:
    [launch, *_] = quick_launches()
    results = []
    with recorded_launches() as recorded:
        launch.kernel[(1,)](*launch.args, **launch.options)
        assert [one.kernel for one in recorded.values()] == [launch.kernel]
        other = threading.Thread(target=lambda: results.append(launch.compile()))
        other.start()
        other.join()
    assert results[0].asm["cubin"]
    assert len(recorded) == 1
