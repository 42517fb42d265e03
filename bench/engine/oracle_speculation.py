"""Speculative decoding at a given acceptance rate, on models with random weights: how much faster decoding becomes.

    python -m bench run oracle_speculation --shape llama8b --engine stoker fast --save
    python -m bench run oracle_speculation --shape llama8b --engine stoker fast eagle3 vllm     # needs vLLM
    python -m bench run oracle_speculation --model MODEL_DIR --small --device cpu               # a small model on a CPU

An oracle remembers the answers of a first run without drafts and drafts them again, a share of the drafts wrong. One engine
with exact numerics measures all of it, and every answer is compared with the first one:

- off, before and after everything else;
- fixed numbers of drafts (--drafts), as far as a step has room for them (--max-rows);
- auto, which is the controller's own choice, with the given acceptance and with drafts that are all wrong.

Tokens/s are those of the time in which all sequences of the batch decode. They are corrected to the exact acceptance, because
a run verifies only a few hundred drafts per sequence: the tokens of a run are replaced by the expected ones of its drafts. A
server's default for --max-rows is 512. Steps of the GPU are measured with CUDA events around each replayed graph; the time
between two of them is the GPU's idle time.

`--engine fast` measures off with fast numerics. `--engine vllm` measures vLLM with an EAGLE-3 head of random weights and
synthetic acceptance, one engine for each of --vllm-drafts (0: without drafts). It has its default settings, except: memory
utilization 0.92, no prefix cache, no tokenizer, and the newer model runner also where it is not the default.

`--engine eagle3` runs the same head in Stoker. Its drafts are wrong, but the time of a step does not depend on that. So
tokens/s at the given acceptance p are computed, and marked as such:

    batch * (1 + p + ... + p^K) / time of a step that verifies K drafts and makes K new ones
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from bench.contract import BenchmarkError, Needs, Report, Result
from bench.support.draft_head import write_head
from bench.support.engine_children import EngineChild, measure_in_turn, wait_for_turn
from bench.support.gpu_server import ENVIRONMENT
from bench.support.model_shapes import SHAPES, title

NAME = "oracle_speculation"
HELP = "speed-up by drafts of a given acceptance: fixed numbers of drafts, auto, off; vLLM with synthetic acceptance"
NEEDS = Needs(
    packages=("torch", "numpy", "safetensors"), programs="vLLM for --engine vllm; a GPU for the full workload"
)
ENGINES = ("stoker", "fast", "eagle3", "vllm")
BATCHES = (1, 8, 64, 256)
# The least speed-up of the best fixed number of drafts at acceptance 0.8 that is asked for, by batch size.
_SPEEDUPS = {
    "llama8b": {1: 2.6, 8: 2.4, 64: 1.8, 256: 1.15},
    "qwen30a3b": {1: 1.5, 8: 1.5, 64: 2.3, 256: 1.7},
}
_TARGET_ACCEPTANCE = 0.8
_EXACT_TARGET, _EXACT_BATCHES = 0.97, range(2, 65)  # of the speed of fast numerics
_VERIFICATION_TARGET = 1 / 1.05
_AUTO_OF_BEST, _AUTO_OF_OFF = 0.95, 0.98
_MAX_IDLE = 0.02
AUTO, ALL_WRONG = "auto", "auto, all wrong"
_IMPORTS = {"vllm": "vllm.entrypoints.llm"}
Runs = Mapping[tuple[int, str], Mapping[str, float]]  # by batch size and drafts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, metavar="DIR", help="a model folder with weights")
    where.add_argument("--shape", choices=tuple(SHAPES), metavar="SHAPE", help="a published shape with random weights")
    parser.add_argument("--random-weights", action="store_true", help="random weights of --model's config.json")
    parser.add_argument(
        "--engine", nargs="+", choices=ENGINES, default=["stoker", "fast"], help="default: stoker and fast"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="default: 1 8 64 256")
    parser.add_argument("--acceptance", type=float, default=0.8, help="share of right drafts (default: %(default)s)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 5, 7], help="default: 1 2 3 4 5 7")
    parser.add_argument("--eagle3-drafts", type=int, nargs="+", default=[1, 3, 5], help="default: 1 3 5")
    parser.add_argument("--vllm-drafts", type=int, nargs="+", default=[0, 3], help="0: off (default: 0 3)")
    parser.add_argument("--head-vocab", type=int, default=32_000, help="tokens that a head drafts (default: 32000)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--decode-tokens", type=int, default=256, help="of each answer (default: %(default)s)")
    parser.add_argument(
        "--max-rows", type=int, default=1024, help="most sampled tokens of a step, drafts included (default: 1024)"
    )
    parser.add_argument("--step-tokens", type=int, default=2048, help="most tokens of a step (default: %(default)s)")
    parser.add_argument("--max-model-tokens", type=int, default=16384, help="default: %(default)s, or the model's")
    parser.add_argument("--device", help="default: the GPU, if there is one")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--kv-memory-gib", type=float, help="default: what the engine chooses")
    parser.add_argument("--small", action="store_true", help="short answers and small batches, for CPUs")
    parser.add_argument("--timeout-s", type=float, default=500.0, help="for one engine (default: 500)")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for all of them together (default: 3600)")
    parser.add_argument("--log-dir", type=Path, default=Path("build/oracle_speculation"), help="default: %(default)s")
    parser.add_argument("--wait", action="store_true", help="wait for a line on stdin after the imports")


def run(args: argparse.Namespace) -> Report:
    if args.small:
        args.batches, args.max_rows, args.decode_tokens = [1, 4], 16, 32
        args.prompt_tokens, args.step_tokens = 16, 128
    if not 0.0 <= args.acceptance < 1.0:
        raise BenchmarkError(f"--acceptance {args.acceptance}: must be at least 0 and less than 1")
    cells = [
        (engine, drafts) for engine in args.engine for drafts in (args.vllm_drafts if engine == "vllm" else (None,))
    ]
    if len(cells) == 1:
        measured = {_cell_name(*cells[0]): _measure_here(args, *cells[0])}
    else:
        children = [_child(args, *cell) for cell in cells]
        by_child = measure_in_turn(children, args.log_dir, args.timeout_s, args.limit_s)
        measured = {name: details for one in by_child.values() for name, details in one.items()}
    report = Report(results(_title(args), args.shape or "", args.acceptance, measured), measured)
    names = [_cell_name(*cell) for cell in cells]
    report.problems += [f"{name} gave no results; see {args.log_dir}" for name in names if name not in measured]
    report.problems += problems(measured)
    return report


def _title(args: argparse.Namespace) -> str:
    return title(args.shape) if args.shape else Path(args.model).name


def _cell_name(engine: str, drafts: int | None) -> str:
    return engine if drafts is None else f"{engine} {drafts}"


def _child(args: argparse.Namespace, engine: str, drafts: int | None) -> EngineChild:
    words = [NAME, "--wait", "--engine", engine]
    words += ["--shape", args.shape] if args.shape else ["--model", str(args.model)]
    for name in ("batches", "drafts", "eagle3_drafts"):
        words += [f"--{name.replace('_', '-')}", *map(str, getattr(args, name))]
    for name in ("acceptance", "head_vocab", "prompt_tokens", "decode_tokens", "max_rows", "step_tokens",
                 "max_model_tokens", "device", "dtype", "threads", "kv_memory_gib"):  # fmt: skip
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    words += ["--random-weights"] if args.random_weights else []
    words += [] if drafts is None else ["--vllm-drafts", str(drafts)]
    return EngineChild(_cell_name(engine, drafts).replace(" ", "-"), words, {})


def _measure_here(args: argparse.Namespace, engine: str, drafts: int | None) -> dict[str, Any]:
    """Measure one engine in this process."""
    module = _IMPORTS.get(engine, "bench.engine._oracle_speculation")
    if engine == "vllm":
        os.environ.update(ENVIRONMENT["vllm"], VLLM_USE_V2_MODEL_RUNNER="1")
    try:
        importlib.import_module(module)
    except ImportError as missing:
        raise BenchmarkError(f"--engine {engine}: {missing}; docs/benchmarks.md says what it needs") from missing
    if args.wait:
        wait_for_turn()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model
        if folder is None:
            folder, args.random_weights = Path(scratch) / "model", True
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        config = json.loads((folder / "config.json").read_text())
        args.max_model_tokens = min(args.max_model_tokens, config["max_position_embeddings"])
        head = Path(scratch) / "head"
        if engine == "vllm":
            from bench.engine._vllm_speculation import measure_vllm

            written = write_head(head, config, args.head_vocab, weights=False) if drafts else None
            return measure_vllm(args, folder, written, drafts or 0, config["vocab_size"])
        from bench.engine import _oracle_speculation as ours

        if engine == "eagle3":
            return {"runs": ours.measure_head(args, folder, write_head(head, config, args.head_vocab))}
        return {
            "runs": ours.measure_oracle(args, folder) if engine == "stoker" else ours.measure_off(args, folder, "fast")
        }


def _by_case(details: Mapping[str, Any]) -> Runs:
    """Return the means of the runs of each batch size and number of drafts."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for one in details.get("runs", ()):
        found.setdefault((one["batch"], one["drafts"]), []).append(one)
    return {
        case: {
            name: mean(run[name] for run in some)
            for name, value in some[0].items()
            if isinstance(value, int | float) and name != "batch"
        }
        for case, some in found.items()
    }


def problems(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Name the runs of exact numerics whose answers differ."""
    return [
        f"{name}, batch {run['batch']}, {run['drafts']}: {run['differing']} of {run['batch']} answers differ"
        for name, details in measured.items()
        if name in ("stoker", "eagle3")
        for run in details["runs"]
        if run["differing"]
    ]


def results(case: str, shape: str, acceptance: float, measured: Mapping[str, Mapping[str, Any]]) -> list[Result]:
    """Return what was measured, beside off, fast numerics and vLLM."""
    ours, fast, heads = (_by_case(measured.get(name, {})) for name in ("stoker", "fast", "eagle3"))
    theirs: dict[tuple[int, str], Mapping[str, float]] = {}
    version = ""
    for name, details in measured.items():
        if name.startswith("vllm"):
            theirs |= _by_case(details)
            version = f"vLLM {details['version']}"
    made: list[Result] = []
    for batch in sorted({batch for batch, _ in (*ours, *theirs, *heads)}):
        where = f"{case}, batch {batch}, acceptance {acceptance:g}"
        made += _drafted(where, shape, acceptance, batch, ours, fast)
        made += _verification(where, batch, ours)
        made += _competitor(where, acceptance, batch, ours, heads, theirs, version)
    return made


def _fixed(runs: Runs, batch: int) -> dict[int, Mapping[str, float]]:
    """Return the runs with fixed numbers of drafts."""
    return {int(drafts): run for (one, drafts), run in runs.items() if one == batch and drafts.isdecimal()}


def _best(runs: Runs, batch: int) -> int | None:
    fixed = _fixed(runs, batch)
    return max(fixed, key=lambda drafts: fixed[drafts]["tokens_per_s"], default=None)


def _drafted(where: str, shape: str, acceptance: float, batch: int, ours: Runs, fast: Runs) -> list[Result]:
    """Return the speed with drafts beside off, and of off beside fast numerics."""
    if (off := ours.get((batch, "off"))) is None:
        return []
    made: list[Result] = []

    def add(
        metric: str, value: float, other: str, other_value: float | None, target: float | None, notes: str = ""
    ) -> None:
        made.append(Result(where, metric, "tokens/s", value, "higher", other, other_value, "baseline", notes, target))

    plain = fast.get((batch, "off"))
    if plain is not None:
        target = _EXACT_TARGET if batch in _EXACT_BATCHES else None
        add("off, exact: speed", off["tokens_per_s"], "off, fast", plain["tokens_per_s"], target)
    else:
        made.append(Result(where, "off, exact: speed", "tokens/s", off["tokens_per_s"], "higher"))
    for drafts, run in sorted(_fixed(ours, batch).items()):
        add(f"{_drafts(drafts)}: speed", run["tokens_per_s"], "off", off["tokens_per_s"], None)
    if (best := _best(ours, batch)) is not None:
        best_speed = ours[batch, str(best)]["tokens_per_s"]
        target = _SPEEDUPS.get(shape, {}).get(batch) if acceptance == _TARGET_ACCEPTANCE else None
        add("best number of drafts: speed", best_speed, "off", off["tokens_per_s"], target, _drafts(best))
        # Off is a number of drafts too: auto is compared with the fastest.
        if (auto := ours.get((batch, AUTO))) is not None:
            fastest = max(best_speed, off["tokens_per_s"])
            add("auto: speed", auto["tokens_per_s"], "the best number of drafts or off", fastest, _AUTO_OF_BEST,
                f"{auto['drafts_per_row']:.2f} drafts per row and step")  # fmt: skip
            add("auto: speed-up", auto["tokens_per_s"], "off", off["tokens_per_s"], _AUTO_OF_OFF)
    if (wrong := ours.get((batch, ALL_WRONG))) is not None:
        add("auto, all drafts wrong: speed", wrong["tokens_per_s"], "off", off["tokens_per_s"], _AUTO_OF_OFF)
    runs = {name: run for (one, name), run in ours.items() if one == batch}
    made.append(Result(where, "differing answers", "answers", sum(run["differing"] for run in runs.values())))
    for name, run in runs.items():
        if "idle_share" in run and name in ("off", AUTO, str(best)):
            metric = f"{_drafts(int(name)) if name.isdecimal() else name}: GPU idle between steps"
            notes = f"at most {100 * _MAX_IDLE:g}% is asked for"
            made.append(Result(where, metric, "%", 100 * run["idle_share"], notes=notes))
    return made


def _drafts(number: int) -> str:
    return f"{number} draft{'s' if number > 1 else ''}"


def _verification(where: str, batch: int, ours: Runs) -> list[Result]:
    """Compare verification steps with plain steps that have the same number of tokens: one for each of more rows."""
    made = []
    for drafts, run in sorted(_fixed(ours, batch).items()):
        tokens = batch * (1 + drafts)
        plain = ours.get((tokens, "off"), {})
        name = "step_ms" if "step_ms" in run and "step_ms" in plain else "wall_step_ms"
        if plain:
            metric = f"verification step, {_drafts(drafts)}"
            other = f"plain step of {tokens} tokens"
            made.append(
                Result(
                    where, metric, "ms", run[name], "lower", other, plain[name], "baseline", target=_VERIFICATION_TARGET
                )
            )
    return made


def _competitor(
    where: str, acceptance: float, batch: int, ours: Runs, heads: Runs, theirs: Runs, version: str
) -> list[Result]:
    """Compare with vLLM: drafts of the oracle, and computed speeds of a head of the same shape."""
    made = []
    our_off, their_off = (runs.get((batch, "off"), {}).get("tokens_per_s") for runs in (ours, theirs))
    their_best = _best(theirs, batch)

    def add(metric: str, unit: str, value: float, other: float | None, notes: str = "") -> None:
        competitor, target = (version, 1.0) if other is not None else ("", None)
        made.append(Result(where, metric, unit, value, "higher", competitor, other, notes=notes, target=target))

    if our_off is not None and their_off is not None:
        add("off: speed beside vLLM", "tokens/s", our_off, their_off)
    our_best = _best(ours, batch)
    if our_best is not None and their_best is not None:
        our_speed = ours[batch, str(our_best)]["tokens_per_s"]
        their_speed = theirs[batch, str(their_best)]["tokens_per_s"]
        notes = f"{_drafts(our_best)} of an oracle; vLLM: {_drafts(their_best)} of a head"
        add("best number of drafts: speed beside vLLM", "tokens/s", our_speed, their_speed, notes)
        if our_off is not None and their_off is not None:
            add("best number of drafts: speed-up beside vLLM", "x", our_speed / our_off, their_speed / their_off, notes)
    for drafts, run in sorted(_fixed(heads, batch).items()):
        speed = batch * sum(acceptance**at for at in range(drafts + 1)) / run["wall_step_ms"] * 1e3
        their_run = theirs.get((batch, str(drafts)))
        other = their_run["tokens_per_s"] if their_run else None
        add(f"EAGLE-3 head, {_drafts(drafts)}: speed", "tokens/s", speed, other, "computed from the time of a step")
        if our_off is not None:
            ratio = other / their_off if other is not None and their_off else None
            add(
                f"EAGLE-3 head, {_drafts(drafts)}: speed-up",
                "x",
                speed / our_off,
                ratio,
                "computed from the time of a step",
            )
    return made
