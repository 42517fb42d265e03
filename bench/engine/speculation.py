"""Whether drafts change an answer, how many of them are right, and how much faster decoding becomes.

Every prompt set runs without drafts and with each drafter, on the same engine settings and with exact numerics. The answers
are compared token by token. Speed is compared with --drafter off in the same run; `fast` numerics are shown beside it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.contract import Needs, Report, Result
from bench.engine.structured_output import bfcl_cases

NAME = "speculation"
HELP = "drafters against --drafter off: identical answers, tokens per step, tokens/s"
NEEDS = Needs(
    packages=("torch", "msgspec", "xgrammar", "tokenizers"),
    data=("prompts/specbench.jsonl.gz", "tools/bfcl.jsonl.gz", "tools/bfcl_multi_turn_functions.json"),
)
SETS = ("calls", "repeated", "specbench", "mtbench", "humaneval", "gsm8k")
_CASES = {
    "calls": "BFCL forced tool calls",
    "repeated": "SpecBench, each request for the second time",
    "specbench": "SpecBench",
    "mtbench": "MT-Bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or name (default: the embedded model)")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="default: all")
    parser.add_argument(
        "--drafters", nargs="+", default=["auto"], help="--drafter settings to compare with off (default: auto)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="running sequences (default: 1)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8], help="default: 0 and 0.8")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each set, spread over it (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--device", help="default: the GPU, if there is one")
    parser.add_argument("--dtype", help="default: the engine's")
    parser.add_argument("--fast", action="store_true", help="also measure off with fast numerics")


def bodies(name: str, data: Path, limit: int) -> list[dict[str, Any]]:
    """Return chat requests of a prompt set."""
    if name == "calls":
        return _spread([case.body for case in bfcl_cases(data / "tools")], limit)
    path = data / "prompts" / f"{'specbench' if name == 'repeated' else name}.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    texts = [row["turns"][0] if "turns" in row else row.get("prompt") or row["question"] for row in rows]
    return _spread([{"model": "m", "messages": [{"role": "user", "content": text[:4000]}]} for text in texts], limit)


def _spread(items: list[Any], limit: int) -> list[Any]:
    return items[:: max(1, len(items) // limit)][:limit]


def run(args: argparse.Namespace) -> Report:
    from bench.engine._speculation import Measured, measure
    from stoker.base.config import EngineSettings
    from stoker.checkpoint.progress import silent
    from stoker.checkpoint.source import default_cache_dir, resolve_model

    folder = resolve_model(args.model, default_cache_dir(os.environ), silent).path
    sets = {name: bodies(name, args.data, args.limit) for name in args.sets}
    report = Report()

    def measured(batch: int, temperature: float, drafter: str, numerics: str) -> dict[str, Measured]:
        settings = EngineSettings(args.device, args.dtype, drafter=drafter, numerics=numerics, max_model_tokens=4096)
        return measure(folder, settings, sets, batch, temperature, args.max_tokens)

    for batch in args.batch:
        for temperature in args.temperature:
            where = f"batch {batch}, T = {temperature:g}"
            off = measured(batch, temperature, "off", "exact")
            fast = measured(batch, temperature, "off", "fast") if args.fast else None
            for drafter in args.drafters:
                found = measured(batch, temperature, drafter, "exact")
                for name in sets:
                    _add(report, f"{_CASES[name]}, {where}", drafter, found[name], off[name])
                    if found[name].answers != off[name].answers:
                        report.problems.append(f"{_CASES[name]}, {where}: {drafter} changes answers")
            if fast is not None:
                for name in sets:
                    case, exact = f"{_CASES[name]}, {where}", off[name].tokens_per_s
                    report.results.append(_speed(case, "off, exact", exact, "off, fast", fast[name].tokens_per_s))
    return report


def _add(report: Report, case: str, drafter: str, found: Any, off: Any) -> None:
    changed = sum(a != b for a, b in zip(found.answers, off.answers, strict=True))
    add: Callable[[Result], None] = report.results.append
    add(Result(case, f"{drafter}: changed answers", f"of {len(off.answers)}", changed))
    add(Result(case, f"{drafter}: tokens per step", "tokens", found.tokens_per_step, "higher"))
    add(Result(case, f"{drafter}: accepted drafts", "%", 100 * found.acceptance, "higher"))
    add(_speed(case, drafter, found.tokens_per_s, "off", off.tokens_per_s))


def _speed(case: str, name: str, value: float, other: str, other_value: float) -> Result:
    return Result(case, f"{name}: speed", "tokens/s", value, "higher", other, other_value, "baseline")
