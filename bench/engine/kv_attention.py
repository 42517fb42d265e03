"""GPU time of one layer's attention over KV of each dtype, with the heads of Llama-3.1-8B."""

from __future__ import annotations

import argparse

from bench.contract import Needs, Report, Result

NAME = "kv_attention"
HELP = "GPU time of attention over 16-bit and 8-bit KV, by batch size and context"
NEEDS = Needs(gpu=True, packages=("torch", "triton", "numpy"))
ROWS, CONTEXTS = (1, 8, 64), (1024, 8192, 32768)
CHUNKS = ((2048, 8192), (8192, 16384))  # tokens, and the tokens before them
_HEADS = (32, 8, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(_args: argparse.Namespace) -> Report:
    import torch

    from bench.engine._kv_attention import attention_s

    cases = {f"{rows} rows at {context:,} tokens": [(context, 1)] * rows for context in CONTEXTS for rows in ROWS}
    cases |= {f"{tokens:,} tokens behind {before:,}": [(before, tokens)] for tokens, before in CHUNKS}
    results = []
    for case, spans in cases.items():
        wide = attention_s(torch.bfloat16, _HEADS, spans) * 1e6
        for name, dtype in (("int8", torch.int8), ("fp8_e4m3", torch.float8_e4m3fn)):
            narrow = attention_s(dtype, _HEADS, spans) * 1e6
            results.append(
                Result(
                    f"{name}, {case}", "attention of a layer", "us", narrow, "lower", "bfloat16 KV", wide, "baseline"
                )
            )
    return Report(results)
