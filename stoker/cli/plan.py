"""`stoker plan`: which layouts of ranks a model can have on given GPUs, with memory and estimated speed."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.base.errors import ConfigError
from stoker.base.output import print_result
from stoker.base.paths import expand_home
from stoker.cli import plan_fleet

if TYPE_CHECKING:
    from stoker.planner.layouts import LayoutPlan, PlannedLayout
    from stoker.planner.vllm_rule import VllmLayout

NAME = "plan"
HELP = "show how a model can be split over GPUs, and what fits"
DESCRIPTION = """Show every layout of a model on some GPUs: what weights and working memory take, how many tokens of KV are left,
and an estimate of the speed. Memory is computed as a worker computes it at its start. Only config.json is read, and no GPU is
needed. The layout marked with * is proposed. With --trace, find the cheapest fleet that keeps a latency goal for a trace, by
simulating fleets of calibrated workers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="A folder with config.json, a config.json file, or a name on the Hugging Face hub.",
    )
    parser.add_argument(
        "--gpus",
        metavar="GPUS",
        help="Machines of GPUs: 8xH100, or 8xH200,8xH200 for two machines. Required without --trace.",
    )
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help="Length of the sequences to plan for. Default: 32768."
    )
    parser.add_argument(
        "--cache-dir", type=expand_home, metavar="DIR", help="The cache folder. Default: ~/.cache/stoker."
    )
    parser.add_argument("--offline", action="store_true", help="Download nothing.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    plan_fleet.add_trace_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from stoker.checkpoint.weight_files import read_json_object
    from stoker.planner.gpus import parse_gpus
    from stoker.planner.layouts import plan_layouts

    if args.trace is not None:
        return plan_fleet.plan_for_trace(args)
    if args.model is None:
        raise ConfigError("give a MODEL to plan for, or a --trace to find a fleet for")
    if args.gpus is None:
        raise ConfigError("give the GPUs to plan for, for example --gpus 8xH100")
    gpus = parse_gpus(args.gpus)
    path = _config_path(args)
    plan = plan_layouts(read_json_object(path), args.model, gpus, args.context)
    print_result(json.dumps(asdict(plan)) if args.json else _table(plan))
    return 0 if plan.picked is not None else 1


def _config_path(args: argparse.Namespace) -> Path:
    from stoker.checkpoint.source import default_cache_dir, resolve_model
    from stoker.cli.serving import progress_line

    given = Path(args.model).expanduser()
    if given.is_file() and given.suffix == ".json":
        return given
    if (given / "config.json").is_file():
        return given / "config.json"
    cache_dir: Path = args.cache_dir or default_cache_dir(os.environ)
    return resolve_model(args.model, cache_dir, progress_line(), args.offline).path / "config.json"


def _table(plan: LayoutPlan) -> str:
    header = (
        "",
        "TP",
        "PP",
        "EP",
        "CP",
        "WORKERS",
        "WEIGHTS",
        "WORKING",
        "KV GIB",
        "KV TOKENS",
        "BATCH",
        "TOKENS/S",
        "MS",
    )
    rows = [header, *(_row(one, number == plan.picked) for number, one in enumerate(plan.layouts))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [f"{plan.model} on {plan.gpus}, sequences of {plan.context:,} tokens", ""]
    for row, one in zip(rows, [None, *plan.layouts], strict=True):
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"{cells}  {'' if one is None else one.why}".rstrip())
    lines += [
        "",
        "WEIGHTS and WORKING: GiB per GPU. KV: of one worker. BATCH: sequences that it runs at a time. TOKENS/S: estimated "
        "decode of all workers. MS: estimated time between two tokens.",
        _vllm_line(plan.vllm),
        *(f"Assumed: {text}." for text in plan.assumptions),
    ]
    if plan.picked is None:
        return "\n".join([*lines, "", "No layout fits. Use more GPUs, GPUs with more memory, or a smaller --context."])
    picked = plan.layouts[plan.picked]
    names = ("tp", "pp", "ep", "cp")
    flags = "".join(f" --{name} {count}" for name in names if (count := getattr(picked, name)) > 1)
    if plan.mean_tokens is not None:
        flags += f" --kv-mean-tokens {plan.mean_tokens}"
    return "\n".join([*lines, "", f"Run {picked.workers} of: stoker serve {plan.model}{flags}"])


def _vllm_line(vllm: VllmLayout) -> str:
    from stoker.planner.vllm_rule import MEMORY_SHARE

    sizes = f"tensor parallel size {vllm.tp}, pipeline parallel size {vllm.pp}, {MEMORY_SHARE:.0%} of each GPU"
    found = (
        f"{vllm.kv_gib_total:.1f} GiB of KV for {vllm.kv_tokens:,} tokens" if vllm.fits else f"does not fit: {vllm.why}"
    )
    return f"vLLM's documented rule ({sizes}): {found}."


def _row(one: PlannedLayout, is_picked: bool) -> tuple[str, ...]:
    sizes: tuple[object, ...] = ("", "", "", "", "", "")
    if one.fits:
        sizes = (
            f"{one.weights_gib_per_gpu:.1f}",
            f"{one.working_gib_per_gpu:.1f}",
            f"{one.kv_gib_total:.1f}",
            f"{one.kv_tokens:,}",
            one.batch,
            f"{one.decode_tokens_per_s:,.0f}",
        )
    last = f"{one.between_tokens_ms:.1f}" if one.fits else ""
    return ("*" if is_picked else "", *map(str, (one.tp, one.pp, one.ep, one.cp, one.workers, *sizes, last)))
