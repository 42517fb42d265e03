"""Chooses how quantised weights are served on a CPU: in 8 bits with one of the kernels of cpu_int8.py, or in float32.

Both are measured once per machine and model. The choice is stored, so that all workers of a machine agree: the number
format is a part of the model's fingerprint, and workers share KV only if their fingerprints are equal. Which 8-bit kernel
is the fastest does not matter for that, because all of them give the same results.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.base.log import EventLog
from stoker.kernels.cpu_int8 import FORMAT, KERNELS, Int8Kernel, Int8Weight, is_exact
from stoker.kernels.linear import Weight, linear, pack_weight
from stoker.models.quantisation import has_grouped_weights

CHOICES = ("auto", "int8", "float32")
_FLOAT32 = "float32"
_ROWS = (1, 4, 32)  # batch sizes that are measured
_MAX_OUTS = 4096  # a larger weight is measured in part
_RUNS = 9  # the fastest run counts: noise only adds time

log = EventLog("engine")


@dataclass(frozen=True, slots=True)
class CpuWeights:
    """How quantised weights are served on a CPU."""

    kernel: Int8Kernel | None  # None: they are dequantised

    @property
    def format(self) -> str | None:
        """The number format for the fingerprint; None: the results are those of the dequantised weights."""
        return None if self.kernel is None else FORMAT

    @property
    def uses_grid(self) -> bool:
        """True if attention rounds queries and keys to a grid (kernels/attention_grid.py). Rounding the inputs of matmuls
        to 8 bits would amplify the noise in the last bits of float32, which depends on how a prompt is cut into chunks."""
        return self.kernel is not None


DEQUANTISED = CpuWeights(None)
Measure = Callable[[int, int], Mapping[str, float]]


def measure(num_outs: int, num_ins: int) -> dict[str, float]:
    """Return the time of a matmul in float32 and with each 8-bit kernel that is exact on this machine: the geometric
    mean over batch sizes, in seconds. One thread is used: on a busy machine, several would measure the other processes."""
    generator = np.random.default_rng(0)
    weight = torch.from_numpy(generator.standard_normal((min(num_outs, _MAX_OUTS), num_ins), np.float32))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            packed: dict[str, Weight] = {_FLOAT32: pack_weight(weight)}
            for name, kernel in KERNELS.items():
                if is_exact(kernel):
                    packed[name] = Int8Weight.of_rows([weight], kernel)
            runs: dict[str, list[float]] = {name: [] for name in packed}
            for num_rows in _ROWS:
                x = torch.from_numpy(generator.standard_normal((num_rows, num_ins), np.float32))
                for name, ready in packed.items():
                    linear(x, ready)
                    runs[name].append(min(_seconds(x, ready) for _ in range(_RUNS)))
    finally:
        torch.set_num_threads(threads)
    return {name: prod(times) ** (1 / len(times)) for name, times in runs.items()}


def choose_cpu_weights(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    hf: Mapping[str, Any],
    cache_dir: Path | None,
    measure: Measure = measure,
) -> CpuWeights:
    """Return how to serve the model of config.json `hf`. `wanted` is one of CHOICES. The choice is stored in `cache_dir`."""
    is_possible = device.type == "cpu" and dtype == torch.float32 and has_grouped_weights(hf)
    if wanted == "int8" and not is_possible:
        raise ConfigError(
            "cpu_weights=int8 needs a GGUF model whose layers are all Q4_0, Q4_1 or Q8_0, device cpu and dtype float32, found "
            f"device {device} and dtype {dtype}; remove --cpu-weights"
        )
    if wanted == _FLOAT32 or not is_possible:
        return DEQUANTISED
    times = _stored_times(hf, cache_dir, measure)
    kernels = sorted((seconds, name) for name, seconds in times.items() if name in KERNELS)
    if wanted == "int8" and not kernels:
        raise ConfigError("cpu_weights=int8: no 8-bit kernel gives exact results on this CPU; remove --cpu-weights")
    if not kernels or (wanted == "auto" and kernels[0][0] > times[_FLOAT32]):
        return DEQUANTISED
    return CpuWeights(KERNELS[kernels[0][1]])


def _stored_times(hf: Mapping[str, Any], cache_dir: Path | None, measure: Measure) -> Mapping[str, float]:
    """Return the measured times, from the file of an earlier start where there is a valid one."""
    machine = _machine()
    model = hashlib.sha256(json.dumps(hf, sort_keys=True).encode()).hexdigest()[:12]
    path = None
    if cache_dir is not None:
        path = cache_dir / f"cpu-weights-{model}-{hashlib.sha256(machine.encode()).hexdigest()[:8]}.json"
        if (stored := _read(path, machine)) is not None:
            return stored
    times = dict(measure(2 * hf["intermediate_size"], hf["hidden_size"]))
    if path is not None:
        try:
            _publish(path, {"format": FORMAT, "machine": machine, "seconds": times})
        except OSError as error:
            log.warning("cpu_weights_not_stored", path=str(path), reason=error.strerror or str(error))
            return times
        # Another worker may have measured at the same time. Whose file came first counts for all.
        return _read(path, machine) or times
    return times


def _read(path: Path, machine: str) -> Mapping[str, float] | None:
    """Return the times in a file; None if there is none, or if it is not valid here. An invalid file is removed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["machine"] != machine:
            raise ValueError(f"it is for {content['format']} on {content['machine']}, not for {FORMAT} on {machine}")
        times = {str(name): float(seconds) for name, seconds in content["seconds"].items()}
        if _FLOAT32 not in times or not all(seconds > 0 for seconds in times.values()):
            raise ValueError("its times are not valid")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning("cpu_weights_file_ignored", path=str(path), reason=str(error), next="kernels are measured again")
        with suppress(OSError):
            path.unlink()
        return None
    return times


def _publish(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file, complete or not at all. A file that is already there is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", suffix=".tmp", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)


def _machine() -> str:
    """Describe what the times depend on: the CPU's model and instructions, and the version of torch."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = (line.partition(":") for line in reversed(lines))
    found = {name.strip(): value.strip() for name, _, value in pairs}
    flags = hashlib.sha256(found.get("flags", "").encode()).hexdigest()[:8]
    return f"{found.get('model name') or platform.machine()}, instructions {flags}, torch {torch.__version__}"


def _seconds(x: Tensor, weight: Weight) -> float:
    started_s = time.perf_counter()
    linear(x, weight)
    return time.perf_counter() - started_s
