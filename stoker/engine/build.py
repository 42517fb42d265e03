"""A model folder and settings -> an Engine that is ready to run."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.base.clock import RealClock
from stoker.base.config import EngineSettings
from stoker.base.errors import ModelFilesError
from stoker.engine.engine import Engine
from stoker.engine.grammar import Grammars, NoGrammars
from stoker.engine.memory import Resolved, num_blocks, resolve
from stoker.engine.rows import RowTable
from stoker.engine.runner import Runner
from stoker.kv.device import DeviceKv
from stoker.kv.layout import KvLayout
from stoker.kv.pool import BlockPool, PoolObserver
from stoker.models.contract import Model, ModelFamily, family_of
from stoker.models.weights import load, parameter_slices
from stoker.sched.scheduler import Scheduler, SchedulerConfig

Progress = Callable[[str, int, int], None]

_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of each file of weights, for the fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class BuiltEngine:
    engine: Engine
    scheduler: Scheduler
    pool: BlockPool
    model: Model
    settings: Resolved
    layout: KvLayout
    vocab_size: int
    max_model_tokens: int  # prompt and answer together: the model's context, or all of the KV if that is less
    fingerprint: str
    load_s: float


def build_engine(
    folder: Path,
    settings: EngineSettings,
    *,
    grammars: Grammars | None = None,
    observer: PoolObserver | None = None,
    random_weights_seed: int | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> BuiltEngine:
    """With `random_weights_seed` no weights are read: the shape of config.json with random values, for benchmarks."""
    started_s = time.monotonic()
    hf = read_hf_config(folder)
    family = family_of(hf, str(folder / "config.json"))
    resolved = resolve(settings, family.shape)
    # cuDNN's attention makes a plan for every new shape, which takes longer than the attention itself.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = _build_model(family, resolved)
    if random_weights_seed is None:
        load(model, family.rules, family.ignored, folder, lambda done, total: progress("loading weights", done, total))
    else:
        _randomise(model, family, random_weights_seed)
    progress("preparing weights", 0, 1)
    with torch.no_grad():
        model.pack()
    layout = _kv_layout(family, resolved)
    blocks = num_blocks(settings, resolved, layout)
    kv = DeviceKv(layout, blocks, resolved.device)
    max_model_tokens = min(resolved.max_model_tokens, blocks * layout.block_tokens)
    max_blocks = -(-max_model_tokens // layout.block_tokens) + 1
    grammars = grammars or NoGrammars()
    rows = RowTable(resolved.max_rows, max_blocks, family.shape.vocab_size, resolved.device, grammars)
    fingerprint = _fingerprint(folder, hf, layout, random_weights_seed)
    pool = BlockPool(blocks, observer)
    config = SchedulerConfig(layout.block_tokens, resolved.step_tokens, resolved.max_rows, fingerprint)
    scheduler = Scheduler(config, pool)
    engine = Engine(scheduler, Runner(model, kv, rows, resolved.threads), RealClock(), resolved.steps_ahead)
    return BuiltEngine(
        engine,
        scheduler,
        pool,
        model,
        resolved,
        layout,
        family.shape.vocab_size,
        max_model_tokens,
        fingerprint,
        time.monotonic() - started_s,
    )


def read_hf_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    try:
        hf = json.loads(path.read_text())
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read ({error.strerror}): is this a model folder?") from error
    except ValueError as error:
        raise ModelFilesError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(hf, dict):
        raise ModelFilesError(f"{path} holds no JSON object; fetch it again")
    return hf


def _build_model(family: ModelFamily, resolved: Resolved) -> Model:
    default = torch.get_default_dtype()
    torch.set_default_dtype(resolved.dtype)
    try:
        with resolved.device:
            return family.build(resolved.max_model_tokens)
    finally:
        torch.set_default_dtype(default)


def _randomise(model: Model, family: ModelFamily, seed: int) -> None:
    """Norms are one, all else is small: the answers are noise, but finite, and the same for the same seed."""
    places = [place for _name, place in parameter_slices(model, family.rules)]
    generator = torch.Generator(places[0].device).manual_seed(seed)
    with torch.no_grad():
        for place in places:
            if place.dim() == 1:
                place.fill_(1.0)
            else:
                place.normal_(0.0, 0.02, generator=generator)


def _kv_layout(family: ModelFamily, resolved: Resolved) -> KvLayout:
    shape = family.shape
    return KvLayout(
        num_layers=shape.num_layers,
        num_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_tokens=resolved.block_tokens,
        dtype=str(resolved.dtype).removeprefix("torch."),
        dtype_bytes=resolved.dtype.itemsize,
    )


def _fingerprint(folder: Path, hf: Mapping[str, Any], layout: KvLayout, seed: int | None) -> str:
    """What must agree before KV is shared. Of the weights a sample counts: hashing hundreds of GB would delay every start,
    and two models of one shape differ nearly everywhere."""
    digest = hashlib.sha256(json.dumps(hf, sort_keys=True).encode())
    digest.update(layout.fingerprint.encode())
    digest.update(repr(seed).encode())
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists():
        digest.update(tokenizer.read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as weights:
            for part in range(_SAMPLES):
                weights.seek(part * size // _SAMPLES)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
