"""Products with weights in 8 and 4 bits on a card: how long they take by rows, beside plain ones.

    python bench/gpu_quant.py OUT.json [--rows 1 8 16 32 64 128 256 2048]

Llama-3.1-8B's products, with enough copies of each weight that the cache holds none. The share is of 4.3 TB/s, what a copy
reaches on an H200. `QUANTISED` is what config.json says of such models: bench/gpu.py --shape llama8b-fp8 runs them whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
from replay import graph_s  # noqa: E402
from torch import Tensor  # noqa: E402

from stoker.kernels.linear import linear  # noqa: E402
from stoker.kernels.quant import QuantWeight, fp8_weight, int4_weight  # noqa: E402
from stoker.kernels.skinny import MOST_ROWS, few_rows_linear  # noqa: E402

PRODUCTS = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
_COPIED_BYTES_PER_S = 4.3e12
_COLD_BYTES = 240_000_000


def _groups(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": inputs,
    }
    said = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    return {**said, "ignore": ["lm_head"]}


_BY_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": _groups("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, _BY_TOKEN),
    "blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "int4": _groups("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None),
}


def made(kind: str, num_outs: int, num_ins: int) -> Tensor | QuantWeight:
    device = torch.device("cuda")
    if kind == "bf16":
        return torch.randn(num_outs, num_ins, device=device, dtype=torch.bfloat16) * 0.02
    if kind == "int4":
        words = torch.randint(0, 2**31 - 1, (num_outs, num_ins // 8), device=device, dtype=torch.int32)
        return int4_weight(words, torch.full((num_outs, num_ins // 32), 0.004, device=device))
    codes = torch.randn(num_outs, num_ins, device=device).mul_(50).to(torch.float8_e4m3fn)
    rows, cols = (1, num_ins) if kind == "fp8" else (128, 128)
    return fp8_weight(codes, torch.full((num_outs // rows, num_ins // cols), 0.0004, device=device), rows, cols, True)


def bytes_of(weight: Tensor | QuantWeight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.codes.nbytes + weight.scale.nbytes


def times(rows: list[int]) -> list[dict[str, Any]]:
    lines = []
    for product, shape in PRODUCTS.items():
        for kind in ("bf16", *QUANTISED):
            weights = [made(kind, *shape)]
            num_bytes = bytes_of(weights[0])
            weights += [made(kind, *shape) for _ in range(_COLD_BYTES // num_bytes)]
            for num_rows in rows:
                x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
                is_plain = kind == "bf16" and num_rows <= MOST_ROWS
                run: Any = few_rows_linear if is_plain else linear
                seconds = graph_s([partial(run, x, weight) for weight in weights])
                share = num_bytes / seconds / _COPIED_BYTES_PER_S
                lines.append({"product": product, "kind": kind, "rows": num_rows, "us": seconds * 1e6, "share": share})
                print(f"{product:8} {kind:7} {num_rows:5} rows {seconds * 1e6:8.1f} us {share:6.1%}", flush=True)
            del weights
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256, 2048])
    args = parser.parse_args()
    args.out.write_text(json.dumps(times(args.rows), indent=1))


if __name__ == "__main__":
    main()
