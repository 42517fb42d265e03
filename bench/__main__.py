"""The runner of all benchmarks.

    python -m bench                       list the benchmarks
    python -m bench run NAME [options]    run one; `run NAME --help` lists its options
    python -m bench report                regenerate bench/RESULTS.md and the plots from bench/results/*.json
    python -m bench merge FILE...         add results that --save-to wrote on another machine to bench/results
    python -m bench make-model DIR        make a model folder with random weights for the GPU benchmarks

Run it from the repository, or with PYTHONPATH set to it. The runner itself needs only the standard library.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import contract, report, results
from bench.contract import Benchmark, BenchmarkError
from bench.support import data_folder, machine, model_folder


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser("bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("list", help="list the benchmarks with one line each (the default)")
    run = commands.add_parser("run", help="run one benchmark", add_help=False)
    run.add_argument("name", metavar="NAME", nargs="?")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    commands.add_parser("report", help="regenerate bench/RESULTS.md and the plots from bench/results/*.json")
    merge = commands.add_parser("merge", help="add results that --save-to wrote on another machine to bench/results")
    merge.add_argument("files", type=Path, nargs="+", metavar="FILE")
    model_folder.add_arguments(commands.add_parser("make-model", help="make a model folder with random weights"))
    args = parser.parse_args(given)
    try:
        if args.command == "run":
            if args.name in (None, "-h", "--help"):
                return _list()
            return _run(contract.find(args.name), args.arguments)
        if args.command == "report":
            for path in report.write_all():
                print(path.relative_to(contract.ROOT))
            return 0
        if args.command == "merge":
            for path in results.merge(args.files):
                print(path)
            return 0
        if args.command == "make-model":
            model_folder.run(args)
            return 0
        return _list()
    except BenchmarkError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _list() -> int:
    group = ""
    for benchmark in contract.load_all():
        if benchmark.group != group:
            group = benchmark.group
            print(f"{group}:")
        print(f"  {benchmark.name:24} {benchmark.help}")
    print("\nRun one with `python -m bench run NAME`; `python -m bench run NAME --help` says what it needs.")
    return 0


def _parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    description = f"{benchmark.description.strip()}\n\nNeeds: {benchmark.needs.describe()}."
    parser = argparse.ArgumentParser(
        f"bench run {benchmark.name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    benchmark.add_arguments(parser)
    if benchmark.needs.data:
        parser.add_argument(
            "--data", type=Path, metavar="DIR", help=f"data folder (default: {data_folder.PLACES_HELP})"
        )
    output = parser.add_argument_group("output")
    output.add_argument("--save", action="store_true", help=f"write the results to bench/results/{benchmark.name}.json")
    output.add_argument(
        "--save-to", type=Path, metavar="DIR", help="write the results there instead; see `bench merge`"
    )
    output.add_argument("--details", type=Path, metavar="FILE", help="write the raw measurements there as JSON")
    output.add_argument("--machine", metavar="TEXT", help="describe this machine in the results (default: detected)")
    return parser


def _run(benchmark: Benchmark, argv: Sequence[str]) -> int:
    args = _parser(benchmark).parse_args(argv)
    _check_needs(benchmark)
    if benchmark.needs.data:
        args.data = data_folder.find(args.data, benchmark.needs.data)
    if args.save or args.save_to is not None:
        _check_output(results.path_of(benchmark.name, args.save_to), args.details)
    found = benchmark.run(args)
    if args.details is not None:
        args.details.parent.mkdir(parents=True, exist_ok=True)
        args.details.write_text(json.dumps(found.details, indent=1) + "\n", encoding="utf-8")
    for result in found.results:
        print(report.line(result))
    if args.save or args.save_to is not None:
        command = f"python -m bench run {shlex.join([benchmark.name, *argv])}"
        path = results.save(benchmark.name, found.results, args.machine or machine.describe(), command, args.save_to)
        print(f"saved {path}; run `python -m bench report` to regenerate bench/RESULTS.md")
    for problem in found.problems:
        print(f"bench: {benchmark.name}: {problem}", file=sys.stderr)
    return 1 if found.problems else 0


def _check_output(path: Path, details: Path | None) -> None:
    """Refuse a file that the results cannot be added to, before anything is measured."""
    if details is not None and details.resolve() == path.resolve():
        raise BenchmarkError(f"--details {details}: the results are written to this file; choose another name")
    results.read_file(path)


def _check_needs(benchmark: Benchmark) -> None:
    missing = [name for name in benchmark.needs.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchmarkError(
            f"{benchmark.name} needs {', '.join(missing)}, which cannot be imported here; "
            "docs/benchmarks.md says which environment each benchmark needs"
        )
    if benchmark.needs.gpu and not machine.has_gpu():
        raise BenchmarkError(f"{benchmark.name} needs a CUDA GPU, and torch finds none on this machine")


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # without it, the servers that a benchmark has started would run on
    sys.exit(main())
