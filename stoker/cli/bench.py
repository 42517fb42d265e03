"""`stoker bench serve`: put load on a running server and measure it from the client's side."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.errors import ConfigError
from stoker.base.paths import expand_home
from stoker.loadgen.datasets import DATASETS, GENERATED, DatasetSpec, load_dataset, num_turns
from stoker.loadgen.load import ARRIVALS, LoadPlan
from stoker.loadgen.prompts import random_tokens, random_words
from stoker.loadgen.session import COMPLETIONS_PATH, LoadSession, TokenRange, Turn
from stoker.loadgen.traces import Replay

if TYPE_CHECKING:
    from stoker.loadgen.client import Target
    from stoker.loadgen.stream import Record

NAME = "bench"
HELP = "put a running server under load and measure it"
SERVE_DESCRIPTION = "Put load on a running server and measure it from the client's side."

DEFAULT_CONCURRENCY = 8
DEFAULT_REQUESTS = 100  # a trace is replayed completely
DEFAULT_MAX_TOKENS = 256
EXIT_FAILURES = 1  # some requests failed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    serve = kinds.add_parser("serve", help="An OpenAI-compatible server.", description=SERVE_DESCRIPTION)
    serve.set_defaults(bench=_serve)
    _add_server_arguments(serve.add_argument_group("server"))
    _add_prompt_arguments(serve.add_argument_group("prompts"))
    _add_load_arguments(serve.add_argument_group("load"))
    serve.add_argument(
        "--json", type=expand_home, metavar="OUT", help="Write configuration, environment and results to this file."
    )


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", help="Address of the server. Default: %(default)s.")
    group.add_argument("--model", help="Model name. Default: the first model that the server lists.")
    group.add_argument(
        "--header", action="append", default=[], metavar="K:V", help="Send this header with every request. Repeatable."
    )
    group.add_argument(
        "--session-header", action="store_true", help="Send each session's id in the header x-session-affinity."
    )
    group.add_argument("--new-connections", action="store_true", help="Open a connection for each request.")
    group.add_argument(
        "--timeout-s", type=float, default=600.0, help="Timeout for a complete answer in seconds. Default: %(default)s."
    )


def _add_prompt_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset", choices=DATASETS, default="random", help="Where the prompts come from. Default: %(default)s."
    )
    group.add_argument(
        "--data-dir", type=expand_home, help="Folder with the data sets. Default: data or ../shared/data."
    )
    group.add_argument("--dataset-file", type=expand_home, help="sharegpt: the data set's file.")
    group.add_argument("--max-turns", type=int, help="Maximum number of turns of each conversation. Default: all.")
    group.add_argument("--flatten-tools", action="store_true", help="Send tool calls and results as plain text.")
    group.add_argument(
        "--input-tokens", type=int, default=512, help="random: mean prompt length. Default: %(default)s."
    )
    group.add_argument(
        "--output-tokens", type=int, default=128, help="random: mean output length. Default: %(default)s."
    )
    group.add_argument(
        "--range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="random: lengths are uniform from mean * (1 - R) to mean * (1 + R). Default: %(default)s.",
    )
    group.add_argument("--vocab-size", type=int, metavar="N", help="random and trace: send token ids below N.")
    group.add_argument(
        "--trace", type=expand_home, metavar="FILE", help="trace: a file in Mooncake's format or of agent sessions."
    )
    group.add_argument(
        "--block-tokens-scale",
        type=int,
        metavar="N",
        help="trace: replace each block by N tokens. All lengths shrink by the same factor.",
    )
    group.add_argument(
        "--speedup", type=float, default=1.0, metavar="X", help="trace: replay X times faster. Default: %(default)s."
    )
    group.add_argument(
        "--max-pause-s",
        type=float,
        default=120.0,
        help="trace: shorten longer pauses to this, before the speedup. Default: %(default)s.",
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        help=f"Maximum output length. Default: {DEFAULT_MAX_TOKENS}; for random and trace the generated length.",
    )
    group.add_argument("--temperature", type=float, default=0.0, help="Sampling temperature. Default: %(default)s.")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="Generate to the full length. Default: on for random and trace.",
    )
    group.add_argument("--seed", type=int, default=0, help="Seed of prompts and arrival times. Default: %(default)s.")


def _add_load_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-requests",
        type=int,
        help=f"Number of requests. Default: {DEFAULT_REQUESTS}; for a trace all of its requests.",
    )
    group.add_argument(
        "--concurrency",
        type=int,
        help=f"Closed loop: sessions at the same time. Default without --rate: {DEFAULT_CONCURRENCY}; for a trace its own "
        "start times.",
    )
    group.add_argument("--rate", type=float, help="Open loop: sessions started per second.")
    group.add_argument(
        "--arrival", choices=ARRIVALS, default="poisson", help="Arrival process for --rate. Default: %(default)s."
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="gamma arrivals: below 1 is burstier than Poisson. Default: %(default)s.",
    )
    group.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="Send N requests first, which are not measured. Default: 0."
    )


def run(args: argparse.Namespace) -> int:
    return int(args.bench(args))


def _serve(args: argparse.Namespace) -> int:
    import uvloop
    from rich.console import Console

    from stoker.loadgen.report import print_report, write_json
    from stoker.loadgen.summary import summarize

    _check(args)
    target, spec = _target(args), _dataset(args)
    sessions = load_dataset(spec)
    load = _load(args, sessions)
    if spec.num_requests is not None and num_turns(sessions) < spec.num_requests:
        print(
            f"stoker: the data set {spec.name} has only {num_turns(sessions)} of {spec.num_requests} requests",
            file=sys.stderr,
        )
    records: list[Record] = []
    interrupted = False
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        args.model = args.model or runner.run(_first_model(target))
        try:
            runner.run(_measure(target, load, _options(args), sessions, args.warmup, records))
        except KeyboardInterrupt:
            interrupted = True
    result = summarize(records)
    outcome = {"load": asdict(load), "sessions": len(sessions), "interrupted": interrupted}
    console = Console(highlight=False)
    try:
        if args.json is not None:  # first: printing fails if stdout was closed
            write_json(args.json, {**_config(args), **outcome}, result)
    finally:
        if interrupted:
            console.print("Interrupted. These are the results of the requests that had ended.")
        print_report(console, result)
    if interrupted:
        raise KeyboardInterrupt
    return EXIT_FAILURES if result.failed else 0


def _check(args: argparse.Namespace) -> None:
    for name in ("vocab_size", "max_tokens", "max_turns", "input_tokens", "output_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be above 0")
    if args.json is not None:  # fail before the load, not after it
        if not os.path.isdir(args.json.parent):
            raise ConfigError(f"--json {args.json}: there is no folder {args.json.parent}")
        if os.path.isdir(args.json):
            raise ConfigError(f"--json {args.json}: this is a folder; give the name of a file")


async def _first_model(target: Target) -> str:
    from stoker.loadgen.client import Client

    async with Client(target) as client:
        return await client.first_model()


async def _measure(
    target: Target,
    load: LoadPlan,
    options: dict[str, Any],
    sessions: list[LoadSession],
    warmup: int,
    records: list[Record],
) -> None:
    from rich.console import Console

    from stoker.base.clock import RealClock
    from stoker.loadgen.client import Client
    from stoker.loadgen.player import play
    from stoker.loadgen.progress import RunEstimate, progress_bar

    clock = RealClock()
    async with Client(target, clock) as client:
        first = LoadPlan(slots=load.slots or 1)
        await play(_warmup(warmup, sessions[0]), client, first, options, lambda turn, record: None, clock)
        estimate = RunEstimate(sessions, load, options["max_tokens"])
        with progress_bar(Console(stderr=True), estimate, clock) as bar:
            task = bar.add_task("requests", total=num_turns(sessions))

            def observe(turn: Turn, record: Record) -> None:
                records.append(record)
                estimate.ended(turn, record)
                bar.advance(task)

            await play(sessions, client, load, options, observe, clock, None if bar.disable else estimate.received)


def _warmup(num_requests: int, like: LoadSession) -> list[LoadSession]:
    """Return warm-up sessions with generated prompts: the measured prompts must not enter the server's cache before."""
    if like.turns[0].prompt.path == COMPLETIONS_PATH:
        return random_tokens(num_requests, 64, 8, 0.0, seed=-1, token_range=TokenRange())
    return random_words(num_requests, 64, 8, 0.0, seed=-1)


def _target(args: argparse.Namespace) -> Target:
    from stoker.loadgen.client import Target

    headers = {}
    for header in args.header:
        name, colon, value = header.partition(":")
        if not colon:
            raise ConfigError(f"--header {header!r}: expected NAME:VALUE")
        headers[name.strip()] = value.strip()
    return Target(args.url, headers, args.timeout_s, args.new_connections, args.session_header)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the body that are the same in all requests."""
    options = {
        "model": args.model,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens or DEFAULT_MAX_TOKENS,
    }
    ignore_eos = args.dataset in GENERATED if args.ignore_eos is None else args.ignore_eos
    # Not a field of OpenAI's API, so it is sent only if it is needed.
    return {**options, "ignore_eos": True} if ignore_eos else options


def _load(args: argparse.Namespace, sessions: list[LoadSession]) -> LoadPlan:
    replays_times = args.concurrency is None and any(session.start_s is not None for session in sessions)
    slots = args.concurrency
    if slots is None and args.rate is None and not replays_times:
        slots = DEFAULT_CONCURRENCY
    return LoadPlan(slots, args.rate, args.arrival, args.burstiness, keep_trace_times=replays_times, seed=args.seed)


def _dataset(args: argparse.Namespace) -> DatasetSpec:
    token_range = TokenRange.below(args.vocab_size) if args.vocab_size else TokenRange()
    default_requests = None if args.dataset == "trace" else DEFAULT_REQUESTS
    return DatasetSpec(
        name=args.dataset,
        num_requests=default_requests if args.num_requests is None else args.num_requests,
        data_dir=args.data_dir,
        file=args.trace if args.dataset == "trace" else args.dataset_file,
        max_turns=args.max_turns,
        max_tokens=args.max_tokens,
        flatten_tools=args.flatten_tools,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        range_ratio=args.range_ratio,
        vocab_size=args.vocab_size,
        replay=Replay(args.block_tokens_scale, args.speedup, args.max_pause_s, token_range),
        seed=args.seed,
    )


def _config(args: argparse.Namespace) -> dict[str, Any]:
    """Return all options. Headers are listed without their values, which may be API keys."""
    config = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in ("run", "bench", "header")
    }
    return {**config, "headers": [header.partition(":")[0] for header in args.header]}
