"""`stoker calibrate`: measure a worker and write the file that `stoker sim` reads."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.base.flags import add_flags, as_table, given_flags
from stoker.base.output import print_result
from stoker.base.paths import expand_home
from stoker.base.settings import Declared, declared, from_table

if TYPE_CHECKING:
    from stoker.checkpoint.source import ModelFolder
    from stoker.engine.memory import ResolvedSettings
    from stoker.loadgen.worker_probe import WorkerProbe
    from stoker.sim.calibration import Calibration, HostCosts, LinkCosts, SpeculationModel, StepSample, WorkerShape
    from stoker.sim.fit import MeasuredStep

NAME = "calibrate"
HELP = "measure a worker's step times for the simulator"
DESCRIPTION = """Measure how long a worker's steps take, and write a calibration file for `stoker sim`. Three ways: `stoker
calibrate MODEL` runs the engine in this process. With --url, a running `stoker serve` is measured over HTTP, with its host
costs; give the same MODEL and engine flags as to that worker. With --gpu, nothing is run: the times are closed-form estimates
from the GPU's published bandwidth and FLOP/s, and the file says so. The machine should be otherwise idle."""

_SECTIONS = ("", "kv", "sched", "store")
_HOLD_OUT = 5  # one in this many measured shapes judges the fit
_PROMPTS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
_FOLLOW_UPS = (
    (512, 32),
    (512, 128),
    (1024, 64),
    (1024, 256),
)  # cached and new tokens: they tell attention from the rest
_ROWS = (1, 2, 4, 8, 16)
_CONTEXTS = (64, 512, 1024)
_MIXED = ((2, 64), (4, 32), (4, 96))  # decoding rows, and the tokens of a prompt in the same step
_DEFAULT_KV_BYTES_PER_S = 1e9
_TIER_NAMES = {"CPU": "host", "DISK": "disk"}  # by medium; any other tier is a shared store
_ESTIMATE_RANGE = 0.3  # an assumption: no estimate was compared with a measurement yet


def _settings() -> list[Declared]:
    return [one for one in declared(EngineSettings) if one.key.rpartition(".")[0] in _SECTIONS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="As for `stoker serve`. Default: SmolLM2-135M-Instruct."
    )
    parser.add_argument("--output", type=expand_home, metavar="FILE", help="The file to write. It is required.")
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        help="Measure this running worker. Repeatable: several workers are measured at the same time, as one kind.",
    )
    parser.add_argument(
        "--gateway", metavar="URL", help="With --url: measure the gateway's part and the hand-off here."
    )
    parser.add_argument(
        "--drafts-from",
        metavar="URL",
        help="Take drafts per step and their acceptance from the traffic that this running worker has had.",
    )
    parser.add_argument("--gpu", metavar="GPUS", help="Estimate a worker on these GPUs, such as 1xH200 or 8xH100.")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="Measurements of each shape. Default: 3.")
    parser.add_argument("--most-rows", type=int, metavar="N", help="Largest batch that is measured. Default: 16.")
    parser.add_argument("--offline", action="store_true", help="Download nothing.")
    parser.add_argument(
        "--cache-dir", type=expand_home, metavar="DIR", help="The cache folder. Default: ~/.cache/stoker."
    )
    add_flags(parser.add_argument_group("engine"), _settings())


def run(args: argparse.Namespace) -> int:
    from stoker.sim.calibration import write_calibration

    _check(args)
    calibration = _estimate(args) if args.gpu is not None else _measure(args)
    write_calibration(calibration, args.output)
    print_result(_table(calibration, args.output))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.output is None:
        raise ConfigError("give the file to write with --output FILE")
    if not os.path.isdir(args.output.parent):
        raise ConfigError(f"--output {args.output}: there is no folder {args.output.parent}")
    if args.gpu is not None and args.url:
        raise ConfigError("--gpu estimates a worker and --url measures one; give only one of them")
    if args.gpu is not None and args.drafts_from is not None:
        raise ConfigError("--drafts-from has no effect with --gpu, which measures nothing; give only one of them")
    if args.gateway is not None and not args.url:
        raise ConfigError("--gateway has no effect without --url: give both")
    for name in ("repeats", "most_rows"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def _model(args: argparse.Namespace) -> ModelFolder:
    from stoker.checkpoint.source import default_cache_dir, resolve_model
    from stoker.cli.serving import progress_line

    cache_dir: Path = args.cache_dir or default_cache_dir(os.environ)
    return resolve_model(args.model, cache_dir, progress_line(), args.offline)


def _measure(args: argparse.Namespace) -> Calibration:
    """Measure the engine in this process, or running workers."""
    from stoker import __version__
    from stoker.engine.build import build_engine
    from stoker.engine.tier_measurement import measure_tiers
    from stoker.sim.calibration import FORMAT, Calibration, HostCosts, LinkCosts
    from stoker.sim.fit import fit

    speculation = _speculation(args.drafts_from)
    settings = from_table(EngineSettings, as_table(given_flags(args, _settings())))
    model = _model(args)
    built = build_engine(model.path, settings)
    try:
        shape = _shape(built.settings, built.pool.num_blocks, built.max_model_tokens, sum_token_bytes(built.layout))
        most_rows = min(args.most_rows or max(_ROWS), shape.max_rows)
        host, transfer = HostCosts(), LinkCosts()
        tiers = measure_tiers(built.store.tiers, built.store.sets[0].block_bytes, args.repeats)
        if args.url:
            built.close()
            probes = asyncio.run(_probe(args, shape, most_rows, model.name, built.vocab_size))
            steps, jitter = _probed_steps(probes[0]), probes[0].jitter
            host, transfer = _host_costs(probes, shape)
        else:
            steps, jitter = _own_steps(built, shape, most_rows, args.repeats), []
    finally:
        built.close()
    step, bounds, residuals = fit(steps, shape.max_rows, jitter)
    return Calibration(
        format=FORMAT,
        stoker=__version__,
        kind="measured",
        model=model.name,
        fingerprint=built.fingerprint,
        device=str(built.settings.device),
        shape=shape,
        step=step,
        bounds=bounds,
        residuals=residuals,
        host=host,
        transfer=transfer,
        tiers={
            _TIER_NAMES.get(one.medium, "shared"): LinkCosts(one.latency_s, one.bytes_per_s) for one in tiers.values()
        },
        speculation=speculation,
        notes=[
            f"measured over HTTP: {', '.join(args.url)}" if args.url else "measured in process; host costs are defaults"
        ],
    )


def _speculation(url: str | None) -> SpeculationModel:
    """Return what a worker's traffic tells about its drafts."""
    from stoker.loadgen.draft_probe import probe_drafts
    from stoker.sim.calibration import SpeculationModel

    if url is None:
        return SpeculationModel()
    found = asyncio.run(probe_drafts(url))
    return SpeculationModel(found.drafts, found.acceptance)


def _own_steps(built: Any, shape: WorkerShape, most_rows: int, repeats: int) -> list[MeasuredStep]:
    from stoker.engine.step_measurement import load_shapes, measure_steps
    from stoker.sim.fit import MeasuredStep

    kv_tokens = shape.kv_blocks * shape.block_tokens
    shapes = list(load_shapes(most_rows, shape.max_model_tokens, kv_tokens, shape.step_tokens))
    found = sorted(measure_steps(built, shapes, repeats))
    edges = {found[0][0].tokens, found[-1][0].tokens}
    return [
        MeasuredStep(work, seconds, held_out=number % _HOLD_OUT == _HOLD_OUT - 1 and work.tokens not in edges)
        for number, (work, seconds) in enumerate(found)
    ]


async def _probe(
    args: argparse.Namespace, shape: WorkerShape, most_rows: int, model: str, vocab_size: int
) -> list[WorkerProbe]:
    """Measure the workers, and then the gateway if there is one."""
    from stoker.loadgen.client import Client, Target
    from stoker.loadgen.worker_probe import probe_worker

    prompts = [length for length in _PROMPTS if length <= min(shape.step_tokens, shape.max_model_tokens - 32)]
    kv_tokens = shape.kv_blocks * shape.block_tokens
    decodes = [
        (rows, context)
        for rows in _ROWS
        for context in _CONTEXTS
        if rows <= most_rows and context + rows * 64 <= kv_tokens and context + 32 <= shape.max_model_tokens
    ]
    longest = min(shape.max_model_tokens - 32, kv_tokens)
    follow_ups = [(cached, new) for cached, new in _FOLLOW_UPS if cached + new <= longest and new <= shape.step_tokens]
    targets = [Target(url) for url in args.url]
    async with Client(targets[0]) as client:
        served = await client.first_model()
    if served != model:
        raise ConfigError(f"--url {args.url[0]} serves {served}, but MODEL is {model}; give the worker's MODEL")
    mixed = [(rows, length) for rows, length in _MIXED if rows <= most_rows and rows + length <= shape.step_tokens // 4]
    probes = [await probe_worker(targets, served, vocab_size, prompts, decodes, args.repeats, follow_ups, mixed)]
    if args.gateway is not None:
        lengths = [length for length in prompts if length > 256] or prompts[-1:]
        probes.append(
            await probe_worker([Target(args.gateway)], served, vocab_size, lengths, [], args.repeats, seed=999)
        )
    return probes


def _probed_steps(probe: WorkerProbe) -> list[MeasuredStep]:
    from stoker.sim.fit import decode_step, mixed_step, prompt_step

    found = []
    largest = max(one.prompt_tokens for one in probe.steps)
    for number, one in enumerate(probe.steps):
        is_edge = one.prompt_tokens == largest or number == len(probe.steps) - 1
        held_out = number % _HOLD_OUT == _HOLD_OUT - 1 and not is_edge
        if one.rows and one.prompt_tokens:
            found.append(mixed_step(one.rows, one.context, one.prompt_tokens, one.seconds, held_out))
        elif one.rows:
            found.append(decode_step(one.rows, one.context, one.seconds, held_out))
        else:
            found.append(prompt_step(one.prompt_tokens, one.context, one.seconds, held_out))
    return found


def _host_costs(probes: Sequence[WorkerProbe], shape: WorkerShape) -> tuple[HostCosts, LinkCosts]:
    """Divide what was measured around the steps: a third of the worker's part is after the step."""
    from stoker.sim.calibration import HostCosts, LinkCosts

    worker_s = probes[0].host_s
    dispatch_s = max(0.0, probes[-1].host_s - worker_s) if len(probes) > 1 else 0.001
    host = HostCosts(dispatch_s=dispatch_s, accept_s=worker_s * 2 / 3, write_s=worker_s / 3)
    if len(probes) == 1 or not probes[1].handoff_gaps_s:
        return host, LinkCosts()
    one_row_s = probes[0].steps[0].seconds
    extra = [(tokens, max(0.0, gap_s - one_row_s)) for tokens, gap_s in probes[1].handoff_gaps_s]
    tokens, longest_s = max(extra)
    latency_s = min(longest_s / 2, worker_s + dispatch_s)
    seconds = max(longest_s - latency_s, tokens * shape.kv_token_bytes / 20e9)
    return host, LinkCosts(latency_s, tokens * shape.kv_token_bytes / seconds)


def _shape(resolved: ResolvedSettings, num_blocks: int, max_model_tokens: int, kv_token_bytes: int) -> WorkerShape:
    from stoker.sim.calibration import WorkerShape

    return WorkerShape(
        block_tokens=resolved.block_tokens,
        step_tokens=resolved.step_tokens,
        max_rows=resolved.max_rows,
        target_itl_s=resolved.target_itl_s,
        steps_ahead=resolved.steps_ahead,
        kv_blocks=num_blocks,
        max_model_tokens=max_model_tokens,
        kv_token_bytes=kv_token_bytes,
        gpus=resolved.layout.num_ranks,
    )


def sum_token_bytes(layout: Any) -> int:
    """Return the bytes of one token's KV, over all KV sets."""
    return int(sum(one.layout.block_bytes for one in layout.sets) // layout.block_tokens)


def _estimate(args: argparse.Namespace) -> Calibration:
    """Estimate a worker on GPUs from published numbers."""
    import hashlib
    import json

    from stoker import __version__
    from stoker.checkpoint.weight_files import read_json_object
    from stoker.planner.gpus import parse_gpus
    from stoker.planner.step_estimate import estimate_worker
    from stoker.sim.calibration import (
        FORMAT,
        CalibratedBounds,
        Calibration,
        LinkCosts,
        Residuals,
        StepModel,
        WorkerShape,
    )

    gpus = parse_gpus(args.gpu)
    given = Path(args.model or "").expanduser()
    is_file = args.model is not None and given.suffix == ".json" and given.is_file()
    if is_file:
        path, name = given, given.stem
    else:
        model = _model(args)
        path, name = model.path / "config.json", model.name
    hf = read_json_object(path)
    worker = estimate_worker(hf, name, gpus, args.max_model_tokens)
    block_tokens = args.block_tokens or 64
    max_rows = args.max_rows or 512
    longest = min(args.max_model_tokens or 131_072, worker.kv_tokens)
    return Calibration(
        format=FORMAT,
        stoker=__version__,
        kind="estimate",
        model=name,
        fingerprint=hashlib.sha256(json.dumps(hf, sort_keys=True).encode()).hexdigest()[:16],
        device=f"{worker.gpus}x{gpus.kind.name}",
        shape=WorkerShape(
            block_tokens=block_tokens,
            step_tokens=args.step_tokens or 8192,
            max_rows=max_rows,
            target_itl_s=(args.target_itl_ms or 75.0) / 1e3,
            steps_ahead=1,
            kv_blocks=args.kv_blocks or worker.kv_tokens // block_tokens,
            max_model_tokens=longest,
            kv_token_bytes=worker.kv_token_bytes,
            gpus=worker.gpus,
        ),
        step=StepModel(list(worker.knots), worker.knot_s, context_s=worker.context_s, attention_s=worker.attention_s),
        bounds=CalibratedBounds(max_rows, 8192, longest),
        residuals=Residuals(_ESTIMATE_RANGE, _ESTIMATE_RANGE, _ESTIMATE_RANGE),
        transfer=LinkCosts(0.002, gpus.kind.link_gb_s * 1e9 / 2),
        notes=["closed-form estimate from published numbers of the GPU; not a measurement"],
    )


def _table(calibration: Calibration, path: Path) -> str:
    residuals, host = calibration.residuals, calibration.host
    further = [
        f"tier {name}: {one.latency_s * 1e3:.2f} ms and {one.bytes_per_s / 1e9:.2f} GB/s"
        for name, one in calibration.tiers.items()
    ]
    if calibration.speculation.drafts:
        speculation = calibration.speculation
        further.append(
            f"drafts: {speculation.drafts} in each step of a row, accepted with {speculation.acceptance:.0%}"
        )
    lines = [
        f"{calibration.model} on {calibration.device} ({calibration.kind}), written to {path}",
        f"error of a step: median {residuals.median:.1%}, p90 {residuals.p90:.1%}, over {len(residuals.samples)} shapes",
        f"host: {host.dispatch_s * 1e3:.1f} ms in the gateway, {(host.accept_s + host.write_s) * 1e3:.1f} ms in the worker",
        *further,
        "",
        "TOKENS   ROWS  CONTEXT  MEASURED MS  PREDICTED MS  ERROR",
    ]
    for one in sorted(residuals.samples, key=lambda one: (one.rows, one.tokens, one.context_tokens)):
        note = "  not used for the fit" if one.held_out else ""
        lines.append(
            f"{one.tokens:6}  {one.rows:5}  {_context(one):7}  {one.measured_s * 1e3:11.2f}  {one.predicted_s * 1e3:12.2f}"
            f"  {one.error:+6.1%}{note}"
        )
    return "\n".join(lines)


def _context(sample: StepSample) -> int:
    """Return the tokens before a step: those of decoding rows, or the cached ones of a prompt."""
    if sample.context_tokens:
        return sample.context_tokens
    return round(sample.attended_pairs / sample.tokens - (sample.tokens + 1) / 2) if sample.attended_pairs else 0
