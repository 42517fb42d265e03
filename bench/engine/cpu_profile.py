"""CPU time of a decode step of the default model by groups of operators, on one thread.

Each row has its own prompt. The times of the groups come from torch's profiler, which adds about a microsecond to an
operator. The time of the step is measured without it: the least CPU time of many steps, because other processes on the
machine only add to it. Matmuls alone are the same 8-bit matmuls, called one after the other: the floor for this kernel.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import BenchmarkError, Needs, Report, Result

if TYPE_CHECKING:
    from stoker.engine.llm import LLM

NAME = "cpu_profile"
HELP = "CPU time of a decode step of the default model by groups of operators"
NEEDS = Needs(packages=("torch", "numpy", "safetensors"))
_STEPS = 40
_GROUPS = {  # group -> beginnings of operator names; the first group that matches counts
    "8-bit matmuls": ("quantized::", "onednn::"),
    "attention": (
        "aten::sparse_sampled_addmm", "aten::_embedding_bag", "aten::_softmax", "aten::_scaled_dot_product",
        "aten::index_select", "aten::index_copy_", "aten::_index_put", "aten::bmm",
    ),
    "rotation before matmuls": ("aten::mm",),
    "views and allocations": (
        "aten::view", "aten::slice", "aten::as_strided", "aten::empty", "aten::narrow", "aten::select", "aten::alias",
        "aten::reshape", "aten::_reshape_alias", "aten::transpose", "aten::split", "aten::chunk", "aten::unsqueeze",
        "aten::expand", "aten::t", "aten::permute", "aten::detach", "aten::resize_",
    ),
}  # fmt: skip
_OTHERS = "elementwise operators, reductions and the rest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32], help="default: 1 4 16 32")
    parser.add_argument("--context", type=int, default=130, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--cpu-weights", default="auto", help="as for `stoker serve` (default: %(default)s)")
    parser.add_argument("--model", help="as for `stoker serve` (default: SmolLM2)")


def run(args: argparse.Namespace) -> Report:
    llm = _llm(args)
    report = Report(details={})
    floor_us = _matmuls_us(llm)
    for rows in args.rows:
        case = f"{args.model or 'SmolLM2'}, {rows} row{'s' if rows > 1 else ''}, {args.context} tokens of context"
        step_us = _step_us(llm, rows, args.context)
        groups, num_operators = _groups(llm, rows, args.context)
        report.details[case] = {"step_us": step_us, "operators": num_operators, "groups": groups}
        report.results.append(Result(case, "decode step", "us", step_us))
        report.results.append(Result(case, "operators called", "", num_operators))
        report.results += [Result(case, name, "us", us) for name, us in groups.items()]
        if rows == 1 and floor_us is not None:
            report.results.append(Result(case, "matmuls alone", "us", floor_us))
        print(f"{case}: {step_us / 1e3:.2f} ms, {num_operators:.0f} operators", flush=True)
    return report


def _llm(args: argparse.Namespace) -> LLM:
    import os

    from stoker.base.config import EngineSettings, KvSettings
    from stoker.base.errors import StokerError
    from stoker.checkpoint.progress import silent
    from stoker.checkpoint.source import default_cache_dir, resolve_model
    from stoker.engine.llm import LLM

    settings = EngineSettings(
        device="cpu", num_threads=1, cpu_weights=args.cpu_weights, drafter="off", kv=KvSettings(num_blocks=2000)
    )
    try:
        folder: Path = resolve_model(args.model, default_cache_dir(os.environ), silent).path
        return LLM(folder, settings)
    except StokerError as error:
        raise BenchmarkError(str(error)) from error


def _start(llm: LLM, rows: int, context: int, num_tokens: int) -> Any:
    """Start the requests and return the engine when each has its first token."""
    from stoker.base.ids import RequestId
    from stoker.sched.request import GenerateRequest, SamplingParams

    engine, started = llm.built.engine, 0
    for row in range(rows):
        prompt = [1 + (7919 * row + 13 * i) % 4000 for i in range(context)]
        name = RequestId(f"{time.monotonic_ns()}-{row}")
        engine.add(GenerateRequest(name, prompt, context, SamplingParams(temperature=0.0), num_tokens))
    while started < rows:
        started += sum(len(chunk.token_ids) for chunk in engine.step())
    return engine


def _step_us(llm: LLM, rows: int, context: int) -> float:
    engine, best_s = _start(llm, rows, context, _STEPS), float("inf")
    while engine.has_work:
        started_s = time.process_time()
        num_tokens = sum(len(chunk.token_ids) for chunk in engine.step())
        if num_tokens == rows:  # not a step of the rest, when some rows have ended
            best_s = min(best_s, time.process_time() - started_s)
    return best_s * 1e6


def _groups(llm: LLM, rows: int, context: int) -> tuple[dict[str, float], float]:
    """Return the time of each group in a step, and the number of operators, including those that others call.

    Each step is profiled by itself, and the least time of a group counts: the profiler's times are those of a clock, which
    runs on while another process has the core.
    """
    from torch.profiler import ProfilerActivity, profile

    engine = _start(llm, rows, context, _STEPS)
    groups = dict.fromkeys([*_GROUPS, _OTHERS], float("inf"))
    num_operators = 0
    while engine.has_work:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            num_tokens = sum(len(chunk.token_ids) for chunk in engine.step())
        if num_tokens != rows:
            continue
        lines = profiled.key_averages()
        num_operators = sum(line.count for line in lines)
        found = dict.fromkeys(groups, 0.0)
        for line in lines:
            name = next((group for group, names in _GROUPS.items() if line.key.startswith(names)), _OTHERS)
            found[name] += line.self_cpu_time_total
        groups = {name: min(us, found[name]) for name, us in groups.items()}
    return groups, num_operators


def _matmuls_us(llm: LLM) -> float | None:
    """Return the time of all 8-bit matmuls of one token, without anything between them."""
    import torch

    from stoker.kernels.cpu_int8 import Int8Weight

    weights = []
    for module in llm.built.model.modules():
        weight = getattr(module, "_packed", None)
        if isinstance(weight, Int8Weight):
            weights.append((weight, torch.ones(1, module.shape[1])))  # type: ignore[operator, index]
    best_s = float("inf")
    with torch.inference_mode():
        for _ in range(_STEPS if weights else 0):
            started_s = time.process_time()
            for weight, x in weights:
                weight.kernel.matmul(x, weight.packed)
            best_s = min(best_s, time.process_time() - started_s)
    return best_s * 1e6 if weights else None
