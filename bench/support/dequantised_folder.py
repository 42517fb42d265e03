"""Writes the converted folder of a GGUF model again with plain weights, for servers that cannot read the conversion.

python -m bench.support.dequantised_folder FOLDER [--model MODEL]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="a GGUF file (default: SmolLM2)")
    args = parser.parse_args()

    from stoker.checkpoint.progress import silent
    from stoker.checkpoint.source import default_cache_dir, resolve_model

    source = resolve_model(args.model, default_cache_dir(os.environ), silent).path
    write_dequantised(source, args.folder)


def write_dequantised(source: Path, folder: Path) -> None:
    """Write the model in bfloat16, with the other files of the folder."""
    import torch
    from safetensors.torch import load_file, save_file

    from stoker.layers.quant import dequantise_grouped

    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder / file.name)
    stored = load_file(source / "model.safetensors")
    weights = {}
    for name, values in stored.items():
        if name.endswith(("_scale", "_min")):
            continue
        if values.dtype == torch.int8:
            values = dequantise_grouped(values, stored[f"{name}_scale"], stored[f"{name}_min"])
        weights[name] = values.bfloat16().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}, indent=2))


if __name__ == "__main__":
    main()
