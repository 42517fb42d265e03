"""Whether tool calls always fit: strict tools under `tool_choice: auto`, and custom tools with a grammar.

- strict: the model gets BFCL functions as strict tools and may answer freely. The turn begins with the opening mark of a call,
  because a small model rarely calls by itself. Every call that is begun and not cut off by the token limit must fit its schema.
- loose: the same without `strict`, for comparison.
- patch: forced calls of a custom tool whose Lark grammar describes a patch. Every input must be a patch.

Prompts, grammars and parsers are the worker's own. The temperatures are spread from 0.6 to 1.3.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.contract import Needs, Report, Result

NAME = "tool_calls"
HELP = "validity of sampled tool calls: strict tools that the model may call, and custom tools with a grammar"
NEEDS = Needs(
    packages=("torch", "msgspec", "xgrammar", "llguidance", "tokenizers", "jsonschema"),
    data=("tools/bfcl.jsonl.gz", "tools/bfcl_multi_turn_functions.json"),
)
SETS = {
    "strict": "BFCL functions, strict tools, tool_choice auto",
    "loose": "the same without strict",
    "patch": "apply_patch with a Lark grammar, forced",
}


@dataclass(slots=True)
class CallOutcomes:
    answers: int = 0
    calls: int = 0  # begun
    valid: int = 0
    cut_off: int = 0  # by the token limit
    invalid: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or name (default: the embedded model)")
    parser.add_argument("--only", choices=tuple(SETS), action="append", help="default: all; can be given several times")
    parser.add_argument("--limit", type=int, default=200, help="answers of each set (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=192, help="of an answer (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="requests at a time (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: tuned at run time)")
    parser.add_argument("--device", help="default: the GPU, if there is one")
    parser.add_argument("--dtype", help="default: the engine's")


def run(args: argparse.Namespace) -> Report:
    from bench.engine._tool_calls import CallSampler
    from stoker.base.config import EngineSettings, SchedSettings
    from stoker.checkpoint.progress import silent
    from stoker.checkpoint.source import default_cache_dir, resolve_model

    folder = resolve_model(args.model, default_cache_dir(os.environ), silent).path
    settings = EngineSettings(
        args.device,
        args.dtype,
        max_model_tokens=4096,
        num_threads=args.threads,
        sched=SchedSettings(max_rows=args.batch),
    )
    sampler = CallSampler(folder, args.data / "tools", args.max_tokens, settings)
    report = Report(details={})
    for name, case in SETS.items():
        if args.only and name not in args.only:
            continue
        outcomes = sampler.run(name, args.limit, args.batch)
        report.details[name] = asdict(outcomes)
        report.results += _results(case, outcomes)
        if outcomes.invalid and name != "loose":
            report.problems.append(f"{name}: {len(outcomes.invalid)} calls do not fit: {outcomes.invalid[:3]}")
    return report


def _results(case: str, outcomes: CallOutcomes) -> list[Result]:
    return [
        Result(case, "calls begun", "calls", outcomes.calls, "higher"),
        Result(case, "calls that fit", "calls", outcomes.valid, "higher"),
        Result(case, "calls that do not fit", "calls", len(outcomes.invalid)),
        Result(case, "calls cut off by the token limit", "calls", outcomes.cut_off),
    ]
