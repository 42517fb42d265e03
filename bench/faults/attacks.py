"""Attacks on a gateway: what its health checks, a paying tenant, its memory and its CPU time show during each of them.

    python -m bench run attacks                  about 10 minutes
    python -m bench run attacks --short          about 2 minutes
    python -m bench run attacks --attack 'chats with wrong keys' --attack 'random bytes'

For each attack, a new `stoker gateway` with API keys starts before two mock workers (bench/support/mock_worker.py), which
describe themselves as Stoker workers with the tokenizer of SmolLM2, so that the gateway tokenizes prompts. A tenant
sends 10 chats per second, half of them streamed, and a prober sends 50 GET /health per second
(bench/support/tenant_probe.py). After a quiet time, the attacker (bench/support/attacker.py) sends at up to 8 MB/s from other
loopback addresses; bench/support/attack_corpus.py lists the attacks. Two rows are controls: no attack, and an attack on a port
that discards everything.

Under an attack without a key, these must hold: /health p99 below 50 ms, every chat of the tenant answered, their p50 within
1.5x of the quiet time, and the gateway's memory within 256 MiB of it. Under an attack with another tenant's key, every chat
must be answered; the other numbers are only reported. Gateway, workers, attacker and clients share the machine's cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from bench.contract import BenchmarkError, Needs, Report, Result
from bench.support.attack_corpus import ATTACKS, Attack
from bench.support.processes import (
    cpu_s,
    environment,
    free_port,
    free_ports,
    process_tree,
    python_module,
    started,
    wait_for_port,
)
from bench.support.router_client import wait_until_answering
from bench.support.tenant_probe import TIMEOUT_S

NAME = "attacks"
HELP = "health checks, a paying tenant, memory and CPU time of the gateway under attacks with and without a key"
NEEDS = Needs(packages=("msgspec", "uvloop", "tokenizers"))
MAX_HEALTH_P99_MS, MAX_P50_RATIO, MAX_GROWTH_MIB = 50.0, 1.5, 256.0
KEYS = {"paying": "sk-1234", "rival": "sk-rival", "limited": "sk-limited"}
NO_ATTACK, SINK = "control: no attack", "control: attack on a null sink"
_SINK_ATTACK = "unknown paths with bodies"
_STREAM_CHUNKS, _CHUNK_MS, _WHOLE_MS = 16, 5, 20


@dataclass(slots=True)
class AttackMeasurement:
    attack: str
    keyless: bool
    health_p50_ms: float
    health_p99_ms: float
    answered: int
    total: int
    p50_ratio: float  # of the tenant's chats to the quiet time before; the worse of whole and streamed
    p99_ratio: float
    growth_mib: float  # peak of resident memory, over the quiet time
    cpu_share: float  # of one core
    attacker: dict[str, Any]
    problems: dict[str, int]  # why chats and health checks were not answered

    @property
    def failures(self) -> list[str]:
        """Return the criteria that this attack breaks."""
        failed = []
        if self.answered < self.total:
            failed.append(f"{self.total - self.answered} of {self.total} chats of the paying tenant were not answered")
        if self.keyless and self.health_p99_ms >= MAX_HEALTH_P99_MS:
            failed.append(f"/health p99 is {self.health_p99_ms:.0f} ms; the limit is {MAX_HEALTH_P99_MS:g} ms")
        if self.keyless and self.p50_ratio > MAX_P50_RATIO:
            failed.append(f"the tenant's p50 is {self.p50_ratio:.2f}x; the limit is {MAX_P50_RATIO:g}x")
        if self.keyless and self.growth_mib >= MAX_GROWTH_MIB:
            failed.append(f"the gateway grew by {self.growth_mib:.0f} MiB; the limit is {MAX_GROWTH_MIB:g} MiB")
        return failed

    @property
    def badness(self) -> float:
        """Return how far the worst number is beyond its limit."""
        return max(
            self.health_p99_ms / MAX_HEALTH_P99_MS,
            self.p50_ratio / MAX_P50_RATIO,
            self.growth_mib / MAX_GROWTH_MIB,
            100.0 * (1 - self.answered / max(1, self.total)),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--attack", action="append", choices=ATTACKS, metavar="NAME", help="only this; repeatable")
    parser.add_argument("--short", action="store_true", help="1 s quiet and 3 s of each attack; p99 is then a maximum")
    parser.add_argument("--quiet-s", type=float, default=3.0, help="before each attack (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack (default: %(default)s)")
    parser.add_argument("--rate-mb", type=float, default=8.0, help="MB/s of the attacker (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what attackers send (default: %(default)s)")
    parser.add_argument("--log-dir", type=Path, default=Path("build/attacks"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    if args.short:
        args.quiet_s, args.seconds = 1.0, 3.0
    from stoker.checkpoint.progress import silent
    from stoker.checkpoint.source import default_cache_dir, resolve_model

    tokenizer = resolve_model(None, default_cache_dir(os.environ), silent).path
    found = []
    attacks: list[Attack | None] = [ATTACKS[name] for name in args.attack or ATTACKS]
    with ExitStack() as held:
        workers = [held.enter_context(_mock_worker(args.log_dir, tokenizer)) for _ in range(2)]
        sink = free_port()
        held.enter_context(started(python_module("bench.support.null_sink", sink), args.log_dir / "sink.log"))
        wait_for_port(sink)
        found.append(_measure(NO_ATTACK, None, workers, args))
        found.append(_measure(SINK, ATTACKS[_SINK_ATTACK], workers, args, target=sink))
        found += [_measure(attack.name, attack, workers, args) for attack in attacks if attack]
    ordered = sorted(found, key=lambda one: one.badness, reverse=True)
    print(_table(ordered))
    return Report(
        [result for one in ordered for result in _results(one)],
        [asdict(one) for one in ordered],
        [f"{one.attack}: {failure}" for one in ordered for failure in one.failures],
    )


@contextmanager
def _mock_worker(log_dir: Path, tokenizer: Path) -> Iterator[str]:
    port = free_port()
    options = ("--chunks", _STREAM_CHUNKS, "--delay-ms", _CHUNK_MS, "--whole-ms", _WHOLE_MS, "--tokenizer", tokenizer)
    with started(python_module("bench.support.mock_worker", port, *options), log_dir / f"worker-{port}.log"):
        wait_for_port(port)
        yield f"http://127.0.0.1:{port}"


def gateway_config(workers: Sequence[str], keys: dict[str, str], dialect: str) -> str:
    """The gateway's settings file: each key is its own tenant; the key `limited` may send 60 requests per minute."""
    lines = []
    for url in workers:
        lines += ["[[worker]]", f'url = "{url}"', f'dialect = "{dialect}"']
    for name, key in keys.items():
        lines += ["[[key]]", f'name = "{name}"', f'tenant = "{name}"']
        lines += [f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
        lines += ["requests_per_minute = 60"] if name == "limited" else []
    return "\n".join(lines) + "\n"


def _measure(
    name: str, attack: Attack | None, workers: Sequence[str], args: argparse.Namespace, target: int | None = None
) -> AttackMeasurement:
    [port] = free_ports(1)
    seconds = args.seconds if attack is None or args.short else max(args.seconds, attack.min_s)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "gateway.toml"
        config.write_text(gateway_config(workers, KEYS, "stoker"))
        command = python_module("stoker.cli.main", "gateway", "--config", config, "--port", port)
        command += ["--store", f"{folder}/usage.db"]
        with started(command, args.log_dir / "gateway.log") as gateway:
            wait_until_answering(port, "mock", 60)
            _reset_peaks(gateway.pid)
            probe = _background("bench.support.tenant_probe", port, KEYS["paying"], args.quiet_s + seconds, niceness=0)
            _wait_for_output(probe)
            time.sleep(args.quiet_s)
            idle_mib = _peak_mib(gateway.pid)
            _reset_peaks(gateway.pid)
            begin_s, begin_cpu_s = time.monotonic(), cpu_s(gateway.pid)
            said = _attack(attack, target or port, seconds, args)
            end_s, used_cpu_s = time.monotonic(), cpu_s(gateway.pid) - begin_cpu_s
            peak_mib = _peak_mib(gateway.pid)
            samples = json.loads(_output(probe, "the tenant").splitlines()[-1])
            if gateway.poll() is not None:
                raise BenchmarkError(f"{name}: the gateway ended with {gateway.returncode}; see {args.log_dir}")
    share = used_cpu_s / (end_s - begin_s)
    found = _judge(name, attack, samples, begin_s, peak_mib - idle_mib, share, said)
    print(json.dumps(asdict(found)), flush=True)
    return found


def _attack(attack: Attack | None, port: int, seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    if attack is None:
        time.sleep(seconds)
        return {}
    options: tuple[object, ...] = ("--rate-mb", args.rate_mb, "--seed", args.seed)
    options += ("--key", KEYS[attack.key]) if attack.key else ()
    process = _background("bench.support.attacker", port, attack.name, seconds, *options, niceness=5)
    said: dict[str, Any] = json.loads(_output(process, "the attacker"))
    return said


def _background(module: str, *arguments: object, niceness: int) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a module; its output goes to a file, because a pipe that is not read would block it."""
    command = ["nice", "-n", str(niceness), *python_module(module, *arguments)]
    out = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _output
    return subprocess.Popen(command, stdout=out, stderr=out, env=environment()), out


def _wait_for_output(running: tuple[subprocess.Popen[bytes], IO[bytes]]) -> None:
    process, out = running
    while process.poll() is None and os.fstat(out.fileno()).st_size == 0:
        time.sleep(0.02)


def _output(running: tuple[subprocess.Popen[bytes], IO[bytes]], name: str) -> str:
    process, out = running
    with out:
        process.wait(timeout=120)
        out.seek(0)
        text = out.read().decode(errors="replace")
    if process.returncode:
        raise BenchmarkError(f"{name} failed: {text[-400:]}")
    return text


def _judge(
    name: str,
    attack: Attack | None,
    samples: list[Any],
    begin_s: float,
    growth: float,
    cpu: float,
    said: dict[str, Any],
) -> AttackMeasurement:
    # An unanswered request counts as one that took until the timeout, so that a quick refusal cannot improve a percentile.
    samples = [(kind, at_s, TIMEOUT_S if why else latency_s, why) for kind, at_s, latency_s, why in samples]
    during = [sample for sample in samples if sample[1] >= begin_s]
    chats = [sample for sample in during if sample[0].startswith("chat")]
    health = [latency_s * 1e3 for kind, _, latency_s, _ in during if kind.startswith("health")]
    ratios = []
    for share in (0.5, 0.99):
        by_kind = []
        for kind in ("chat whole", "chat stream"):
            quiet = [one[2] for one in samples if one[0] == kind and one[1] < begin_s]
            if not quiet:
                raise BenchmarkError(f"{name}: no {kind} was sent in the quiet time; raise --quiet-s")
            by_kind.append(percentile([one[2] for one in chats if one[0] == kind], share) / percentile(quiet, share))
        ratios.append(max(by_kind))
    return AttackMeasurement(
        attack=name,
        keyless=attack is None or attack.is_keyless,
        health_p50_ms=round(percentile(health, 0.5), 2),
        health_p99_ms=round(percentile(health, 0.99), 2),
        answered=sum(not sample[3] for sample in chats),
        total=len(chats),
        p50_ratio=round(ratios[0], 3),
        p99_ratio=round(ratios[1], 3),
        growth_mib=round(growth, 1),
        cpu_share=round(cpu, 3),
        attacker=said,
        problems=dict(Counter(f"{sample[0]}: {sample[3]}" for sample in during if sample[3])),
    )


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("inf")


def _peak_mib(root: int) -> float:
    """Return the peak of resident memory since it was last reset, summed over the process and its descendants."""
    kib = 0
    for pid in process_tree(root):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return kib / 1024


def _reset_peaks(root: int) -> None:
    for pid in process_tree(root):
        file = os.open(f"/proc/{pid}/clear_refs", os.O_WRONLY)
        try:
            os.write(file, b"5")  # resets VmHWM
        finally:
            os.close(file)


def _table(ordered: Sequence[AttackMeasurement]) -> str:
    head = f"{'attack':38} {'health p50':>10} {'p99 ms':>8} {'answered':>9} {'p50':>6} {'p99':>7} {'MiB':>6} {'CPU':>5}"
    lines = [head + f" {'MB/s':>6}"]
    for one in ordered:
        mark = "FAIL" if one.failures else "ok"
        lines.append(
            f"{one.attack:38} {one.health_p50_ms:10.1f} {one.health_p99_ms:8.1f} {f'{one.answered}/{one.total}':>9} "
            f"{one.p50_ratio:5.2f}x {one.p99_ratio:6.1f}x {one.growth_mib:6.0f} {one.cpu_share:5.2f} "
            f"{one.attacker.get('mb_per_s', 0.0):6.2f} {mark}"
        )
    return "\n".join(lines)


def _results(one: AttackMeasurement) -> list[Result]:
    notes = "" if one.keyless else "with another tenant's key"
    answered = round(100 * one.answered / max(1, one.total), 2)
    return [
        Result(one.attack, "/health p99", "ms", one.health_p99_ms, notes=notes),
        Result(one.attack, "chats answered", "%", answered, "higher", notes=notes),
        Result(one.attack, "chat p50 to quiet time", "x", one.p50_ratio, notes=notes),
        Result(one.attack, "memory growth", "MiB", one.growth_mib, notes=notes),
    ]
