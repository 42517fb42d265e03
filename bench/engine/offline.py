"""An engine without HTTP: start time, KV memory, decode steps, prefill and a mixed load.

    python -m bench run offline --shape qwen4b qwen32b --engine vllm stoker --save     # random weights; needs vLLM
    python -m bench run offline --shape compared --engine vllm stoker --save           # all shapes that are compared
    python -m bench run offline --shape llama1b                                        # Stoker alone
    python -m bench run offline --model MODEL_DIR --small --batches 1 8                # a small model on a CPU

A decode step is the difference between 272 and 16 output tokens over 256, from prompts of 128 tokens, greedy. Prefill
is 16 prompts of 4,096 tokens with one output token. The mix is 512 requests of 1,024 tokens in and 256 out, all at once.
Prompts are random, so the prefix cache finds nothing. --small scales the workload down for CPUs. vLLM runs with its
default settings, except: memory utilization 0.92, no prefix cache, no tokenizer. SGLang: no prefix cache, no tokenizer.

Several shapes or engines are measured one after the other, each in a process of its own; `bench/support/model_shapes.py`
has the shapes, and the list of those that are compared with competitors. --repeats 1 and --decode-tokens 128
halve the time of large models, whose steps are long enough to be timed in one run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.contract import BenchmarkError, Better, Needs, Report, Result
from bench.support.engine_children import EngineChild, measure_in_turn, wait_for_turn
from bench.support.model_shapes import COMPARED, SHAPES, title
from bench.support.offline_engines import ENGINES, SEED, OfflineEngine

NAME = "offline"
HELP = "decode steps, prefill, mixed load, start and KV memory of the engine without HTTP; Stoker or vLLM"
NEEDS = Needs(
    packages=("torch", "numpy", "safetensors"), programs="vLLM for --engine vllm; a GPU for the full workload"
)
BATCHES = (1, 8, 64, 256)
_FIRST_TOKEN_ID, _END_TOKEN_ID = 10, 48_000
# The least ratio to the competitor that is asked for, on every shape.
_TARGETS = {
    "decode_b1_ms": 1.2,
    "decode_b8_ms": 1.15,
    "decode_b64_ms": 1.1,
    "decode_b256_ms": 1.1,
    "prefill_4k_toks": 1.0,
    "mix_512x1024x256_out_toks": 1.05,
}
# Name of a measurement -> metric, unit, which is better.
_METRICS: dict[str, tuple[str, str, Better]] = {
    "prefill_4k_toks": ("prefill, 16 prompts of 4,096 tokens", "tokens/s", "higher"),
    "ttft_8k_ms": ("first token of an 8,192-token prompt", "ms", "lower"),
    "mix_512x1024x256_out_toks": ("512 requests, 1,024 in, 256 out", "output tokens/s", "higher"),
    "prefill_512_toks": ("prefill, 4 prompts of 512 tokens", "tokens/s", "higher"),
    "ttft_2k_ms": ("first token of a 2,048-token prompt", "ms", "lower"),
    "mix_16x256x64_out_toks": ("16 requests, 256 in, 64 out", "output tokens/s", "higher"),
    "kv_gib": ("KV memory", "GiB", "higher"),
    "init_s": ("load until ready", "s", "lower"),
}


class Workload:
    """The same requests for every engine."""

    def __init__(self, engine: OfflineEngine) -> None:
        self._engine = engine
        self._rng = random.Random(SEED)
        self._vocab = min(_END_TOKEN_ID, engine.vocab_size)

    def seconds(self, count: int, num_in: int, num_out: int) -> float:
        prompts = [[self._rng.randrange(_FIRST_TOKEN_ID, self._vocab) for _ in range(num_in)] for _ in range(count)]
        begin_s = time.perf_counter()
        lengths = self._engine.generate(prompts, num_out)
        elapsed_s = time.perf_counter() - begin_s
        assert lengths == [num_out] * count, lengths
        return elapsed_s

    def decode_step_s(self, batch: int, num_out: int, repeats: int = 2) -> float:
        self.seconds(batch, 128, 8)
        short_s = min(self.seconds(batch, 128, 16) for _ in range(repeats))
        long_s = min(self.seconds(batch, 128, 16 + num_out) for _ in range(repeats))
        return (long_s - short_s) / num_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, metavar="DIR", help="a model folder with weights")
    where.add_argument(
        "--shape",
        nargs="+",
        choices=("compared", *SHAPES),
        metavar="SHAPE",
        help=f"published shapes with random weights, such as {', '.join(COMPARED)}; `compared` stands for these",
    )
    parser.add_argument("--random-weights", action="store_true", help="random weights of --model's config.json")
    parser.add_argument("--engine", nargs="+", choices=tuple(ENGINES), default=["stoker"], help="default: stoker")
    parser.add_argument(
        "--competitor", type=Path, metavar="FILE", help="the --details of another engine's run of the same shape"
    )
    parser.add_argument("--device", help="default: the GPU, if there is one")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--max-model-tokens", type=int, default=16384, help="default: %(default)s")
    parser.add_argument("--kv-memory-gib", type=float, help="default: what the engine chooses")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="default: 1 8 64 256")
    parser.add_argument("--only", nargs="+", choices=("decode", "prefill", "mix"), default=["decode", "prefill", "mix"])
    parser.add_argument("--decode-tokens", type=int, default=256, help="of a decode run (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="of each decode run; prefill has one more (default: 2)")
    parser.add_argument("--small", action="store_true", help="a workload for CPUs")
    parser.add_argument("--timeout-s", type=float, default=500.0, help="for one shape and engine (default: 500)")
    parser.add_argument("--limit-s", type=float, default=7200.0, help="for all of them together (default: 7200)")
    parser.add_argument("--log-dir", type=Path, default=Path("build/offline"), help="default: %(default)s")
    parser.add_argument("--wait", action="store_true", help="wait for a line on stdin after the imports")


def run(args: argparse.Namespace) -> Report:
    shapes = [name for given in args.shape or () for name in (COMPARED if given == "compared" else (given,))]
    cases = list(dict.fromkeys(shapes)) or [str(args.model)]
    if len(cases) * len(args.engine) == 1:
        [case], [engine] = cases, args.engine
        other = json.loads(args.competitor.read_text()) if args.competitor else {"engine": engine}
        found = {other["engine"]: other, engine: _measure_here(args, case, engine)}
        return Report(results(_title(args, case), found), found[engine])
    if args.competitor is not None:
        raise BenchmarkError("--competitor is for one shape and one engine; name both engines with --engine instead")
    children = [_child(args, case, engine) for case in cases for engine in args.engine]
    measured = measure_in_turn(children, args.log_dir, args.timeout_s, args.limit_s)
    report = Report(details=measured)
    for case in cases:
        names = {engine: _child_name(args, case, engine) for engine in args.engine}
        report.results += results(_title(args, case), {e: measured[n] for e, n in names.items() if n in measured})
        report.problems += [f"{n} gave no results; see {args.log_dir}" for n in names.values() if n not in measured]
    return report


def _title(args: argparse.Namespace, case: str) -> str:
    return title(case) if args.shape else Path(case).name


def _measure_here(args: argparse.Namespace, case: str, engine_name: str) -> dict[str, Any]:
    try:
        importlib.import_module(ENGINES[engine_name].module)
    except ImportError as missing:
        raise BenchmarkError(f"--engine {engine_name}: {missing}; docs/benchmarks.md says what it needs") from missing
    if args.wait:
        wait_for_turn()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model
        if folder is None:
            folder, args.random_weights = Path(scratch), True
            (folder / "config.json").write_text(json.dumps(SHAPES[case]))
        engine = ENGINES[engine_name].build(args, folder)
    return {"engine": engine_name, **engine.facts} | _measure(args, engine)


def _child_name(args: argparse.Namespace, case: str, engine: str) -> str:
    return f"{case if args.shape else Path(case).name}-{engine}"


def _child(args: argparse.Namespace, case: str, engine: str) -> EngineChild:
    words = [NAME, "--wait", "--engine", engine, "--shape" if args.shape else "--model", case]
    words += ["--max-model-tokens", str(args.max_model_tokens), "--repeats", str(args.repeats)]
    words += ["--decode-tokens", str(args.decode_tokens)]
    words += ["--batches", *map(str, args.batches), "--only", *args.only]
    for name in ("device", "dtype", "threads", "kv_memory_gib"):
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    words += [f"--{name.replace('_', '-')}" for name in ("random_weights", "small") if getattr(args, name)]
    return EngineChild(_child_name(args, case, engine), words, ENGINES[engine].environment)


def _measure(args: argparse.Namespace, engine: OfflineEngine) -> dict[str, float]:
    work, found = Workload(engine), dict[str, float]()
    found["first_token_s"] = work.seconds(1, 32, 1)

    def tell(**values: float) -> None:
        found.update(values)
        print(" ".join(f"{name}={value:.2f}" for name, value in values.items()), flush=True)

    num_out = 32 if args.small else args.decode_tokens
    for batch in args.batches if "decode" in args.only else ():
        step_s = work.decode_step_s(batch, num_out, 1 if args.small else args.repeats)
        tell(**{f"decode_b{batch}_ms": step_s * 1e3})
    if args.small:
        if "prefill" in args.only:
            tell(prefill_512_toks=4 * 512 / work.seconds(4, 512, 1), ttft_2k_ms=work.seconds(1, 2048, 1) * 1e3)
        if "mix" in args.only:
            tell(mix_16x256x64_out_toks=16 * 64 / work.seconds(16, 256, 64))
        return found
    if "prefill" in args.only:
        work.seconds(8, 4096, 1)
        tell(prefill_4k_toks=16 * 4096 / min(work.seconds(16, 4096, 1) for _ in range(args.repeats + 1)))
        # A model of 8,192 positions has no place for the token after a prompt of that length.
        length = min(8192, engine.max_tokens - 1)
        tell(ttft_8k_ms=min(work.seconds(1, length, 1) for _ in range(args.repeats + 1)) * 1e3)
    if "mix" in args.only:
        tell(mix_512x1024x256_out_toks=512 * 256 / work.seconds(512, 1024, 256))
    return found


def results(case: str, found: dict[str, dict[str, Any]]) -> list[Result]:
    """The numbers of Stoker, beside those of each other engine for the same measurements."""
    ours = found.get("stoker", {})
    others = [details for name, details in found.items() if name != "stoker"] or [{}]
    made = []
    for theirs in others:
        name = str(theirs.get("engine", ""))
        competitor = " ".join(filter(None, [ENGINES[name].title if name else "", str(theirs.get("version", ""))]))
        for key, value in ours.items():
            if key.startswith("decode_b"):
                metric, unit, better = f"decode step, batch {key[8:-3]}", "ms", "lower"
            elif key in _METRICS:
                metric, unit, better = _METRICS[key]
            else:
                continue
            known = key in theirs
            target = _TARGETS.get(key) if known else None
            made.append(
                Result(case, metric, unit, value, better, competitor if known else "", theirs.get(key), target=target)  # type: ignore[arg-type]
            )
    return made
