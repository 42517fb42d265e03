"""GPUs that `stoker plan` knows, and how `--gpus` names machines of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stoker.base.errors import ConfigError

_MACHINE_GPUS = 8  # GPUs of one machine, where --gpus gives only a total
_MAX_GPUS = 1024
_ITEM = re.compile(r"(?:(\d{1,6})\s*[xX*]\s*)?([A-Za-z0-9-]{2,20})")


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A GPU, with published numbers. `memory_gib` is what the driver reports."""

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float  # without sparsity
    link_gb_s: float  # to the other GPUs of its machine, one direction


_KINDS = {
    kind.name: kind
    for kind in (
        GpuKind("A100", 80.0, 2039, 312, 300),
        GpuKind("H100", 79.65, 3350, 989, 450),
        GpuKind("H200", 140.4, 4800, 989, 450),
        GpuKind("B200", 179.0, 8000, 2250, 900),
        GpuKind("L40S", 45.0, 864, 362, 32),
        GpuKind("RTX4090", 24.0, 1008, 165, 32),
        GpuKind("RTX5090", 31.8, 1792, 210, 64),
    )
}


@dataclass(frozen=True, slots=True)
class GpuMachines:
    """The GPUs of one fleet: `machines` has the number of GPUs of each machine."""

    kind: GpuKind
    machines: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.machines)

    def __str__(self) -> str:
        return ",".join(f"{count}x{self.kind.name}" for count in self.machines)


def parse_gpus(text: str) -> GpuMachines:
    """Parse `--gpus`: machines separated by commas, such as `8xH100` or `8xH200,8xH200`. A count above 8 means machines of
    eight GPUs."""
    machines: list[int] = []
    kinds: list[str] = []
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise ConfigError(f"--gpus {text!r}: {item.strip()!r} is not COUNTxKIND, such as 8xH100")
        count, kind = int(match[1] or 1), match[2].upper().removeprefix("NVIDIA-")
        if kind not in _KINDS:
            raise ConfigError(f"--gpus {text!r}: {match[2]!r} is not known; known are: {', '.join(_KINDS)}")
        if not 1 <= count <= _MAX_GPUS:
            raise ConfigError(f"--gpus {text!r}: {count} GPUs; give 1 to {_MAX_GPUS}")
        kinds.append(kind)
        whole, rest = divmod(count, _MACHINE_GPUS)
        machines += [_MACHINE_GPUS] * whole + ([rest] if rest else [])
    if len(set(kinds)) > 1:
        raise ConfigError(f"--gpus {text!r}: the ranks of one model need GPUs of one kind; plan each kind on its own")
    return GpuMachines(_KINDS[kinds[0]], tuple(machines))
