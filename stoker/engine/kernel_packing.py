"""Packs the compiled kernels of some models into an archive, on a machine with or without their GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.base.allowance import usable_cores
from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.engine.kernel_plan import find_launches, load_kernel, make_stand_in, warn_of_cache
from stoker.engine.memory import resolve_on
from stoker.engine.part import kv_layout
from stoker.kernels.compiled.compile_ahead import KernelLaunch, compile_all
from stoker.kernels.compiled.cross_compile import compile_for
from stoker.kernels.compiled.kernel_archive import KernelArchive, Manifest, hash_of_sources, write_archive
from stoker.kernels.compiled.kernel_cache import KernelCache, install, name_in_archive
from stoker.models.family import family_of

_GPU = torch.device("cuda")

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PackedKernels:
    num_kernels: int
    num_compiled: int  # the others were in the archive already
    num_bytes: int  # of the archive


def pack_kernels(
    configs: Mapping[str, Mapping[str, Any]], path: Path, arch: int | None, report: Report
) -> PackedKernels:
    """Write an archive with the kernels of these models, given as the contents of config.json by the model's name.

    Without `arch`, it is for this machine's GPU, and holds its launchers for this Python version too. What the file at
    `path` already has is not compiled again.
    """
    import triton

    here = _this_gpu()
    if arch is None and here is None:
        raise ConfigError(
            "this machine has no GPU; say which one to compile for with --arch, such as --arch 90 for Hopper"
        )
    for_this_gpu = arch is None or arch == here
    arch = arch or here
    assert arch is not None
    if not for_this_gpu:
        compile_for(arch)
    with tempfile.TemporaryDirectory() as folder:
        cache = KernelCache(Path(folder), [KernelArchive(path)] if path.is_file() else [], warn_of_cache)
        install(cache)
        for name, config in configs.items():
            launches = _launches(name, config)
            errors = compile_all(launches, usable_cores(), load_kernel if for_this_gpu else _keep)
            if errors:
                raise ConfigError(f"{name}: {len(errors)} of {len(launches)} kernels cannot be compiled: {errors[0]!r}")
            report(f"{name}: {len(launches)} kernels")
        manifest = Manifest(arch, triton.__version__, hash_of_sources(), list(configs))
        write_archive(path, manifest, _members(Path(folder)))
        counts = cache.counts
    return PackedKernels(counts.compiled + counts.from_archive, counts.compiled, path.stat().st_size)


def _keep(kernel: Any) -> None:
    return


def _this_gpu() -> int | None:
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _launches(name: str, config: Mapping[str, Any]) -> list[KernelLaunch]:
    family = family_of(config, name)
    resolved = resolve_on(_GPU, EngineSettings(), family.shape)
    stand_in = make_stand_in(family, resolved, kv_layout(family, resolved))
    if stand_in is None:
        raise ConfigError(f"{name}: no kernel supports its head size of {family.shape.head_dim}")
    return find_launches(stand_in, with_rest=True)


def _members(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.glob("*/*"):
        name = name_in_archive(path)
        if name is not None:
            yield name, path.read_bytes()
