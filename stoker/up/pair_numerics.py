"""Warns of prefill and decode workers that cannot share KV, because their settings make them compute differently.

An engine with a drafter uses exact numerics by default, and one without uses fast numerics. Their KV differs in its last bits, so
a decode worker refuses the KV of such a prefill worker and computes the whole prompt again.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.up.config import FleetConfig, WorkersConfig
from stoker.up.machine import Machine

_EXACT, _FAST = "exact", "fast"


def pair_words(config: FleetConfig, machine: Machine) -> Iterator[str]:
    """Yield a line for each prefill and decode [[workers]] of one model whose numerics differ."""
    numbered = list(enumerate(config.workers))
    for i, prefill in numbered:
        for j, decode in numbered:
            if (prefill.role, decode.role) != ("prefill", "decode") or prefill.model != decode.model:
                continue
            first, second = _numerics(prefill, machine), _numerics(decode, machine)
            if first is not None and second is not None and first != second:
                yield (
                    f"warning: the prefill workers of workers[{i}] compute with numerics={first} ({_drafter(prefill)}), and the "
                    f"decode workers of workers[{j}] with numerics={second} ({_drafter(decode)}), so they share no KV and "
                    "every prompt is computed twice; give both the same drafter, or the same numerics"
                )


def _drafter(workers: WorkersConfig) -> str:
    drafter = workers.options.get("drafter")
    return "no drafter is set" if drafter is None else f"drafter={drafter}"


def _numerics(workers: WorkersConfig, machine: Machine) -> str | None:
    """Return the numerics of the workers, or None if they depend on the model: on a CPU, 8-bit weights have a drafter by
    default."""
    given, drafter = workers.options.get("numerics", "auto"), workers.options.get("drafter")
    if given != "auto":
        return str(given)
    if drafter is None:
        device = workers.options.get("device")
        on_gpu = bool(workers.devices or machine.gpu_bytes) if device is None else str(device).startswith("cuda")
        return _FAST if on_gpu else None
    return _FAST if drafter == "off" else _EXACT
