"""What a narrower KV cache does to a model's answers, on a CPU in float32.

    python -m bench run kv_accuracy MODEL_DIR

The model reads windows of texts, each token behind the true tokens before it. Compared with a float32 cache: the
perplexity, how often the most likely token is the same, the KL divergence of the next token's distribution, and the error
of single attention outputs in the worst layer. The first rows are settings of --kv-dtype. The others are ways to scale
8-bit values that were not chosen: they are emulated by rounding K and V before they are written to a float32 cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.contract import Needs, Report, Result

NAME = "kv_accuracy"
HELP = "perplexity and greedy agreement with a 16-bit or 8-bit KV cache"
TEXTS = ("train/tinyshakespeare.txt.gz", "train/gsm8k_train.jsonl.gz", "agentic/sweagent_demos.jsonl.gz")
NEEDS = Needs(packages=("torch", "numpy", "safetensors", "tokenizers"), data=TEXTS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=4, help="windows of each text (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    from bench.engine._kv_rounding import Reader, attention_errors, ways

    reader = Reader(args.model, [args.data / text for text in TEXTS], args.window, args.windows, args.threads)
    results = []
    expected = reader.read("auto")
    for way in ways():
        found = reader.read(way.kv_dtype, way.rounding)
        for metric, unit, value, better in (
            ("perplexity / float32's", "%", 100 * (found.perplexity() / expected.perplexity() - 1), "lower"),
            ("same most likely token as float32", "%", 100 * found.agreement(expected), "higher"),
            ("KL divergence", "nat/1000", 1000 * found.divergence(expected), "lower"),
            ("attention output, worst layer", "relative error", found.worst_layer, "lower"),
        ):
            results.append(Result(way.title, metric, unit, value, better))  # type: ignore[arg-type]
        print(way.title, [f"{result.value:.4g}" for result in results[-4:]], flush=True)
    for case, errors in attention_errors().items():
        results += [Result(f"{title}, {case}", "attention output", "relative error", error) for title, error in errors]
        print(case, [f"{title} {error:.3g}" for title, error in errors], flush=True)
    notes = f"perplexity {expected.perplexity():.3f} with float32, {expected.num_tokens} tokens"
    return Report([*results, Result("float32", "perplexity", "", expected.perplexity(), notes=notes)])
