"""Make a model folder of a published shape with random weights, for GPU benchmarks over HTTP.

    python -m bench make-model DIR --tokenizer SOME_MODEL_DIR [--shape qwen30a3b] [--weights]

The tokenizer of any other model is used; tokens that its vocabulary lacks are made up, because random weights can
produce any token id. Without --weights, servers must be told to use random weights.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import BenchmarkError
from bench.support.model_shapes import PLAIN

if TYPE_CHECKING:
    import torch

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FILE_BYTES = 4e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
    parser.add_argument("--shape", choices=tuple(PLAIN), default="llama8b", help="default: %(default)s")
    parser.add_argument(
        "--weights", action="store_true", help="write random weights: 16 GB for llama8b, 61 GB for qwen30a3b"
    )


def run(args: argparse.Namespace) -> None:
    if not (args.tokenizer / "tokenizer.json").is_file():
        raise BenchmarkError(f"--tokenizer {args.tokenizer}: there is no tokenizer.json in it")
    make(args.folder, PLAIN[args.shape], args.tokenizer)
    if args.weights:
        write_weights(args.folder)


def make(folder: Path, shape: dict[str, Any], tokenizer: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "tokenizer_config.json").write_text((tokenizer / "tokenizer_config.json").read_text())
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())
    tokens = vocabulary["model"]["vocab"]
    names = ("Ġq" + "".join(letters) for letters in product(_LETTERS, repeat=4))
    while len(tokens) < shape["vocab_size"]:
        tokens.setdefault(next(names), len(tokens))
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))


def write_weights(folder: Path) -> None:
    """Write random weights of config.json's shape, in files of about 4 GB."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    part: dict[str, torch.Tensor] = {}
    file_of: dict[str, str] = {}

    def flush() -> None:
        file = f"model-{len(set(file_of.values())):05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(part, file))
        part.clear()

    for name, size in _tensors(folder):
        if len(size) == 1:
            part[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            part[name] = (torch.randn(size, device=device, dtype=torch.bfloat16) * 0.02).cpu()
        if sum(tensor.nbytes for tensor in part.values()) > _FILE_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def _tensors(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a checkpoint's tensors, as the model family declares them."""
    import torch

    from stoker.engine.model_identity import read_hf_config
    from stoker.models.family import family_of
    from stoker.models.weights import parameter_slices

    family = family_of(read_hf_config(folder), str(folder))
    with torch.device("meta"):
        model = family.build(64)
    return [(name, tuple(place.shape)) for name, place in parameter_slices(model, family.rules)]
