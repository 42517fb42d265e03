"""Settings that depend on the model and the hardware. Every "auto" is resolved here, except the size of the KV cache
(kv_memory.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stoker.base.allowance import usable_cores
from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.engine.threads import FixedThreads, Threads, ThreadTuner
from stoker.models.family import ModelShape
from stoker.parallel.shard import RankLayout
from stoker.sched.step_budget import plans_in_flight
from stoker.spec.choose_drafters import AUTO, OFF, DrafterChoice

# The arithmetic of the largest captured step. It takes an H200 about 50 ms, longer than the host needs to launch it.
_CAPTURED_FLOP = 30e12
_MIN_CAPTURED_TOKENS = 512
_FP8 = (8, 9)  # the first compute capability that converts float8


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Engine settings in which every "auto" has a value."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_tokens: int
    step_tokens: int
    captured_tokens: int  # the largest step with prefill that is captured as a CUDA graph
    max_rows: int
    target_itl_s: float
    threads: Threads
    steps_ahead: int
    max_model_tokens: int
    drafters: DrafterChoice
    exact: bool  # numerics=exact
    layout: RankLayout
    keeps_spare: bool  # the worker keeps a second engine process, which has a context on the same device


def resolve(settings: EngineSettings, shape: ModelShape) -> ResolvedSettings:
    """Return the settings with a value for every "auto", for this machine and model."""
    return resolve_on(_device(settings.device), settings, shape)


def resolve_on(
    device: torch.device, settings: EngineSettings, shape: ModelShape, layout: RankLayout | None = None
) -> ResolvedSettings:
    """Return the same for a given device, which this machine may lack. `layout` is by default that of the settings."""
    on_cpu = device.type == "cpu"
    # float32 is the fastest dtype on CPUs without bfloat16 instructions.
    dtype = getattr(torch, settings.dtype or ("float32" if on_cpu else "bfloat16"))
    if settings.max_model_tokens is not None and settings.max_model_tokens > shape.max_positions:
        raise ConfigError(
            f"max_model_tokens={settings.max_model_tokens}, but the model supports at most {shape.max_positions} tokens"
        )
    step_tokens = settings.sched.step_tokens or (512 if on_cpu else 8192)
    ranks = settings.ranks
    layout = layout or RankLayout(ranks.tp, ranks.pp, ranks.ep, ranks.cp)
    drafters = DrafterChoice.parse(OFF if settings.drafter is None else settings.drafter)
    return ResolvedSettings(
        device=device,
        dtype=dtype,
        kv_dtype=_kv_dtype(settings.kv.dtype, dtype, device),
        block_tokens=_block_tokens(settings, layout.cp, on_cpu),
        step_tokens=step_tokens,
        captured_tokens=min(step_tokens, _captured_tokens(shape)),
        max_rows=settings.sched.max_rows or (64 if on_cpu else 512),
        target_itl_s=(settings.sched.target_itl_ms or (250.0 if on_cpu else 75.0)) / 1e3,
        threads=_threads(settings, on_cpu),
        steps_ahead=max(_steps_ahead(settings, on_cpu), plans_in_flight(layout.pp) - 1),
        max_model_tokens=settings.max_model_tokens or shape.max_positions,
        drafters=drafters,
        exact=is_exact(settings.numerics, has_drafter=drafters.is_on),
        layout=layout,
        keeps_spare=settings.spare_engine == "on" or (settings.spare_engine is None and not on_cpu),
    )


def with_default_drafters(resolved: ResolvedSettings, settings: EngineSettings) -> ResolvedSettings:
    """Return the settings for an engine with 8-bit weights on a CPU, where drafts pay and exact numerics cost nothing.

    With other weights on a CPU, exact numerics take up to 1.8 times as long. On a GPU, drafts are not yet benchmarked.
    """
    if settings.drafter is not None:
        return resolved
    return replace(resolved, drafters=DrafterChoice.parse(AUTO), exact=is_exact(settings.numerics, has_drafter=True))


def is_exact(numerics: str, *, has_drafter: bool) -> bool:
    """Return True if logits must not depend on the batch. `numerics` is the setting."""
    return has_drafter if numerics == "auto" else numerics == "exact"


def _kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the KV cache, for a model that computes in `dtype`."""
    kv_dtype: torch.dtype = {"auto": dtype, "fp8_e4m3": torch.float8_e4m3fn}.get(name) or getattr(torch, name)
    if kv_dtype != dtype and kv_dtype.itemsize >= dtype.itemsize:
        model = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"kv.dtype={name} takes {kv_dtype.itemsize} bytes per value and the model's {model} takes {dtype.itemsize}, so "
            f"it would save nothing; leave out --kv-dtype, or use --kv-dtype int8 or --dtype {name}"
        )
    if kv_dtype == torch.float8_e4m3fn and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8:
            raise ConfigError(
                f"kv.dtype={name} needs a GPU of compute capability 8.9 or later, and {device} has "
                f"{'.'.join(map(str, capability))}; use --kv-dtype int8"
            )
    return kv_dtype


def _block_tokens(settings: EngineSettings, cp: int, on_cpu: bool) -> int:
    """Return the tokens of a block, which `cp` ranks split. A GPU's kernels need pages of at least 16 tokens."""
    given = settings.kv.block_tokens
    if given is not None:
        if given % cp:
            raise ConfigError(
                f"kv.block_tokens={given} is not a multiple of cp={cp}; use --block-tokens {-(-given // cp) * cp}"
            )
        return given
    page_tokens = max(-(-16 // cp), 1) if on_cpu else max(64 // cp, 16)
    return cp * page_tokens


def _captured_tokens(shape: ModelShape) -> int:
    """Return the tokens of the largest captured step, a power of two. Launching a larger step hides behind computing it."""
    tokens = int(_CAPTURED_FLOP / (2 * shape.active_weights))
    return max(_MIN_CAPTURED_TOKENS, 1 << (tokens.bit_length() - 1))


def _device(name: str | None) -> torch.device:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if num_gpus else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"device={name!r}: must be cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r}: must be cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError(f"device={name!r}: torch finds {num_gpus} CUDA devices on this machine")
    # torch.cuda.set_device and comparisons with the device of a tensor need its number.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _steps_ahead(settings: EngineSettings, on_cpu: bool) -> int:
    return (0 if on_cpu else 1) if settings.steps_ahead is None else settings.steps_ahead


def _threads(settings: EngineSettings, on_cpu: bool) -> Threads:
    cores, num_ranks = usable_cores(), settings.ranks.tp * settings.ranks.pp
    if settings.num_threads is not None:
        return FixedThreads(settings.num_threads)
    if (
        num_ranks > 1
    ):  # they wait for each other in every layer, and threads beyond the cores would make them wait longer
        return FixedThreads(max(1, min(4, cores // num_ranks)))
    return ThreadTuner(cores) if on_cpu else FixedThreads(min(4, cores))
