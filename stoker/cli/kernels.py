"""`stoker kernels`: compile GPU kernels before they are needed, and pack them into an archive."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.base.extras import install_command
from stoker.base.output import print_result

NAME = "kernels"
HELP = "compile GPU kernels ahead, and pack them for other machines"
DESCRIPTION = """Compile the GPU kernels of some models and pack them into an archive. `stoker serve --kernel-archive FILE` then
starts on a new machine without compiling. An archive for Hopper GPUs and common models comes with Stoker. A kernel depends on the
model's shape, the GPU, Triton's version and Stoker's version; a worker compiles what no archive has."""
BUILD_HELP = "Compile the kernels of models and write an archive. What the file already has is not compiled again."
CHECK_HELP = "Show what an archive holds, and whether its kernels are those of this version of Stoker."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    build = actions.add_parser("build", help=BUILD_HELP, description=BUILD_HELP)
    build.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="A model folder, or its config.json.")
    build.add_argument(
        "--out", type=Path, default=Path("kernels.zip"), metavar="FILE", help="The archive. Default: kernels.zip."
    )
    build.add_argument(
        "--arch",
        type=int,
        metavar="N",
        help="Compute capability of the GPU without the dot: 80 for A100, 90 for H100 and H200. A machine without this GPU "
        "can compile for it too. Default: this machine's GPU.",
    )
    check = actions.add_parser("check", help=CHECK_HELP, description=CHECK_HELP)
    check.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="Archives. Default: those that come with Stoker."
    )


def run(args: argparse.Namespace) -> int:
    return _build(args.models, args.out, args.arch) if args.action == "build" else _check(args.files)


def _build(models: list[Path], out: Path, arch: int | None) -> int:
    try:
        import triton  # noqa: F401  (before the kernels, which are not defined without it)
    except ImportError as error:
        raise ConfigError(f"compiling kernels needs Triton; install it with: {install_command('gpu')}") from error
    from stoker.engine.kernel_packing import pack_kernels

    packed = pack_kernels(dict(map(_read_config, models)), out, arch, print_result)
    print_result(
        f"{out}: {packed.num_kernels} kernels, of which {packed.num_compiled} were compiled now; "
        f"{packed.num_bytes / (1 << 20):.2f} MiB"
    )
    return 0


def _read_config(model: Path) -> tuple[str, Mapping[str, Any]]:
    from stoker.engine.model_identity import read_hf_config

    folder = model.parent if model.name == "config.json" else model
    return folder.resolve().name, read_hf_config(folder)


def _check(files: list[Path]) -> int:
    from stoker.kernels.compiled.kernel_archive import SHIPPED_FOLDER, KernelArchive

    archives = [KernelArchive(path) for path in files or sorted(SHIPPED_FOLDER.glob("*.zip"))]
    if not archives:
        print_result("No archives come with this version of Stoker.")
        return 0
    return max(map(_check_archive, archives))


def _check_archive(archive: Any) -> int:
    from stoker.kernels.compiled.kernel_archive import hash_of_sources

    try:
        manifest = archive.manifest
    except (OSError, ValueError) as error:
        raise ConfigError(f"{archive.path} is not a readable archive ({error}); build it again") from error
    is_current = manifest.sources == hash_of_sources()
    print_result(
        f"{archive.path}: {'current' if is_current else 'stale: its kernels have other sources'}\n"
        f"  {archive.num_kernels} kernels for compute capability {manifest.arch}, Triton {manifest.triton}\n"
        f"  models: {', '.join(manifest.models)}"
    )
    return 0 if is_current else 1
