"""Ranks that share one GPU: what they exchange through CUDA IPC, and the answers of engines whose layers they split. Runs under
pytest (-m gpu), or as a script without pytest, which also prints times:

    python tests/gpu/test_one_gpu_ranks_cuda.py [exchange] [answers] [timing] [slices]

`slices` is without MPS, where the ranks take turns on the GPU. Every process is killed at its deadline, because a rank that
waits for another one would keep the GPU.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(1, str(Path(__file__).parent))
if __name__ != "__main__":
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

import no_pytest  # noqa: F401 - before what is a test too
from mps import mps
from test_engine_cuda import make_folder
from test_ranks_cuda import EXPERTS, SPLITTABLE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXCHANGE_S, ANSWERS_S, TIMING_S = 60.0, 150.0, 120.0
REPLAYS, SLICED_REPLAYS = 50, 5
NEW_TOKENS, SLICED_NEW_TOKENS = 64, 8
MODELS = {"dense": SPLITTABLE, "experts": EXPERTS}
LAYOUTS = (("dense", 2, 1), ("dense", 4, 1), ("experts", 2, 2))  # the model, tp and ep
PLAIN = ("plain", "any")  # what the GPU samples in one launch, or all ways

Env = Mapping[str, str]


def start(script: str, arguments: Sequence[object], env: Env, log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own. What it says is in the file `log`."""
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-u", str(HERE / script), *map(str, arguments)],
            env={**env, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")},
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def wait_for(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline_s: float) -> None:
    """Wait until all have ended well. Otherwise kill them, and raise AssertionError with what they said."""
    give_up_s, problem = time.monotonic() + deadline_s, ""
    while not problem and any(process.poll() is None for process in processes):
        if time.monotonic() > give_up_s:
            problem = f"not done after {deadline_s:g} s"
        elif any(process.poll() for process in processes):
            time.sleep(0.5)  # the others may say why
            problem = "failed"
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
    said = [log.read_text(errors="replace") for log in logs]
    if problem or any(codes):
        raise AssertionError(
            f"{problem or 'failed'}, exit codes {codes}\n" + "\n----\n".join(one[-3000:] for one in said)
        )
    print("".join(said), end="", flush=True)


def check_exchanges(num_ranks: int, num_replays: int, env: Env) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free, tempfile.TemporaryDirectory() as folder:
        port = free.getsockname()[1]
        free.close()
        logs = [Path(folder, f"{rank}.log") for rank in range(num_ranks)]
        ranks = [
            start("one_gpu_exchange.py", (port, rank, num_ranks, num_replays), env, log)
            for rank, log in enumerate(logs)
        ]
        wait_for(ranks, logs, EXCHANGE_S)


class Answers:
    """The token ids of engines on the GPU, compared with those of the CPU, which are computed meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._on_cpu: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        for name, config in MODELS.items():
            (folder / name).mkdir()
            make_folder(folder / name, config)
            for plain in PLAIN:
                self._on_cpu[name, plain] = self._start(name, "cpu", 1, 1, plain, os.environ)

    def _start(self, name: str, device: str, tp: int, ep: int, plain: str, env: Env) -> subprocess.Popen[bytes]:
        out = self._out(name, device, tp, plain)
        arguments = ("answers", self._folder / name, device, tp, ep, plain, out)
        return start("one_gpu_engine.py", arguments, env, out.with_suffix(".log"))

    def _out(self, name: str, device: str, tp: int, plain: str) -> Path:
        return self._folder / f"{name}-{device}-{tp}-{plain}.json"

    def check(self, name: str, tp: int, ep: int, plain: str, env: Env) -> None:
        out = self._out(name, "cuda", tp, plain)
        wait_for([self._start(name, "cuda", tp, ep, plain, env)], [out.with_suffix(".log")], ANSWERS_S)
        assert self._on_cpu[name, plain].wait(ANSWERS_S) == 0, "the CPU's answers failed"
        found, expected = (json.loads(path.read_text()) for path in (out, self._out(name, "cpu", 1, plain)))
        same = sum(a == b for a, b in zip(found, expected, strict=True))
        assert found == expected, f"{same} of {len(expected)} answers are equal"

    def close(self) -> None:
        for process in self._on_cpu.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def time_steps(tp: int, new_tokens: int, env: Env) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        wait_for([start("one_gpu_engine.py", ("timing", tp, new_tokens), env, log)], [log], TIMING_S)


def test_ranks_exchange_tensors_through_shared_memory() -> None:
    for num_ranks in (2, 4):
        with mps() as env:
            check_exchanges(num_ranks, REPLAYS if env else SLICED_REPLAYS, env or os.environ)


def test_split_layers_on_one_gpu_give_the_answers_of_the_cpu(tmp_path: Path) -> None:
    on_cpu = Answers(tmp_path)
    try:
        for layout in LAYOUTS:
            for plain in PLAIN:
                with mps() as env:
                    on_cpu.check(*layout, plain, env or os.environ)
    finally:
        on_cpu.close()


class Script:
    """Runs checks one after the other, and goes on after one that fails."""

    def __init__(self) -> None:
        self.num_failed = 0

    def run(self, name: str, function: Callable[..., None], *arguments: object, uses_mps: bool = True) -> None:
        """Run a check, whose last argument is the environment of its processes. Each has an MPS of its own, because a killed
        process may leave an MPS in an undefined state."""
        started_s, result = time.monotonic(), "ok"
        try:
            with mps() if uses_mps else nullcontext() as env:
                function(*arguments, env or os.environ)
        except Exception as error:
            self.num_failed += 1
            result = f"FAILED: {type(error).__name__}: {error}"
        print(f"{name}: {result} ({time.monotonic() - started_s:.1f} s)", flush=True)


def main() -> int:
    parts, script = set(sys.argv[1:]) or {"exchange", "answers", "timing", "slices"}, Script()
    with tempfile.TemporaryDirectory() as folder:
        on_cpu = Answers(Path(folder)) if "answers" in parts else None
        try:
            if "exchange" in parts:
                for num_ranks in (2, 4):
                    script.run(f"exchange of {num_ranks} ranks", check_exchanges, num_ranks, REPLAYS)
            if on_cpu is not None:
                for (name, tp, ep), plain in product(LAYOUTS, PLAIN):
                    script.run(f"answers of tp {tp}, ep {ep}, {plain} sampling", on_cpu.check, name, tp, ep, plain)
            if "timing" in parts:
                for tp in (1, 2, 4):
                    script.run(f"steps of tp {tp}", time_steps, tp, NEW_TOKENS)
            if "slices" in parts:
                for num_ranks in (2, 4):
                    name = f"exchange of {num_ranks} ranks without MPS"
                    script.run(name, check_exchanges, num_ranks, SLICED_REPLAYS, uses_mps=False)
                for tp in (1, 2, 4):
                    script.run(f"steps of tp {tp} without MPS", time_steps, tp, SLICED_NEW_TOKENS, uses_mps=False)
        finally:
            if on_cpu is not None:
                on_cpu.close()
    print("all ok" if not script.num_failed else f"{script.num_failed} failed", flush=True)
    return 1 if script.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
