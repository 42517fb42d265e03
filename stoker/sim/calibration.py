"""Calibration: how long a worker takes, as data in a JSON file. `stoker calibrate` writes it, the simulator reads it.

The time of a step is

    curve(tokens) + row * sampled rows + context * context tokens + attention * attended pairs

`curve` is linear between its knots: a step of few tokens is bound by reading the weights, one of many by arithmetic.
`context` is what each token of context of a decoding row costs. `attention` is the cost of one pair of a prompt token and a
token before it. On a CPU, decode-only steps of equal work differ. `jitter` says by how much; longer steps average it out.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from pathlib import Path
from typing import Any, Literal

import msgspec

from stoker.base.errors import ConfigError

FORMAT = 1
# Larger numbers are mistakes, and the simulator's memory grows with them.
_MOST = {
    "shape.kv_blocks": 1 << 25,
    "shape.block_tokens": 1 << 16,
    "shape.step_tokens": 1 << 20,
    "shape.max_rows": 1 << 16,
    "shape.max_model_tokens": 1 << 27,
}


class CalibrationError(ConfigError):
    """A calibration file cannot be used: it is damaged, or it is for another model or version."""

    code = "calibration_error"


class StepModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The coefficients of a step's time. Times are in seconds."""

    knots: list[int]  # tokens of a step, ascending
    knot_s: list[float]  # the curve's value at each knot
    row_s: float = 0.0  # for each row that samples
    context_s: float = 0.0  # for each token of context of a decoding row
    attention_s: float = 0.0  # for each pair of a prompt token and a token before it
    jitter: list[float] = []  # measured over typical time of decode-only steps, in equally likely parts; empty: none

    def curve_s(self, num_tokens: int) -> float:
        """Return the curve's value. It is extended linearly beyond its last two knots."""
        knots, values = self.knots, self.knot_s
        if num_tokens <= knots[0] or len(knots) == 1:
            return values[0]
        at = min(bisect_right(knots, num_tokens), len(knots) - 1)
        low, high = knots[at - 1], knots[at]
        return values[at - 1] + (values[at] - values[at - 1]) * (num_tokens - low) / (high - low)

    def seconds(self, num_tokens: int, rows: int, context_tokens: int, attended_pairs: float) -> float:
        """Return the time of a step. `context_tokens` are those of decoding rows; see the module docstring."""
        linear_s = self.row_s * rows + self.context_s * context_tokens + self.attention_s * attended_pairs
        return self.curve_s(num_tokens) + linear_s


class WorkerShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of the worker that was measured."""

    block_tokens: int
    step_tokens: int
    max_rows: int
    target_itl_s: float
    steps_ahead: int
    kv_blocks: int
    max_model_tokens: int
    kv_token_bytes: int
    gpus: int = 1


class HostCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times outside of steps, in seconds."""

    dispatch_s: float = 0.001  # from the client's request until the gateway has chosen a worker
    token_s: float = 0.0  # for each prompt token: parsing, tokenizing and hashing
    accept_s: float = 0.001  # from the gateway's request until the engine has the sequence
    write_s: float = 0.0005  # from the end of a step until the client has its tokens


class LinkCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Moving KV to a device: from a prefill worker, or from a tier."""

    latency_s: float = 0.002
    bytes_per_s: float = 1e9


class SpeculationModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speculative decoding: each step verifies `drafts` tokens of a row; each is accepted with `acceptance`, if those before
    it were."""

    drafts: int = 0
    acceptance: float = 0.0


class CalibratedBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The largest steps that were measured. Beyond them, the model extrapolates."""

    rows: int
    step_tokens: int
    context_tokens: int  # of one row


class StepSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured and the predicted time of one shape of step."""

    tokens: int
    rows: int
    context_tokens: int
    attended_pairs: float
    measured_s: float
    predicted_s: float
    held_out: bool = False  # it was not used for the fit

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Residuals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Relative errors of the fit. `range_share` widens or narrows every step for the range of a prediction."""

    median: float
    p90: float
    range_share: float
    samples: list[StepSample] = []


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's speed. `kind` tells measurements from closed-form estimates."""

    format: int
    stoker: str  # the version that wrote the file
    kind: Literal["measured", "estimate"]
    model: str
    fingerprint: str  # of model, tokenizer, KV layout and dtype
    device: str
    shape: WorkerShape
    step: StepModel
    bounds: CalibratedBounds
    residuals: Residuals
    host: HostCosts = HostCosts()
    transfer: LinkCosts = LinkCosts()
    tiers: dict[str, LinkCosts] = {}
    speculation: SpeculationModel = SpeculationModel()
    notes: list[str] = []


def read_calibration(path: Path, version: str, model: str | None = None) -> Calibration:
    """Read a calibration file. Raise CalibrationError if it is not for this version, or not for `model`."""
    if not os.path.isfile(path):
        raise CalibrationError(
            f"--calibration {path}: no such file; write one with `stoker calibrate MODEL --output {path}`"
        )
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise CalibrationError(f"--calibration {path}: not a calibration file: {wrong}") from wrong
    except OSError as wrong:
        raise CalibrationError(f"--calibration {path}: cannot be read: {wrong.strerror}") from wrong
    if found.format != FORMAT or found.stoker != version:
        raise CalibrationError(
            f"--calibration {path}: written by Stoker {found.stoker} in format {found.format}, but this is Stoker {version} "
            f"with format {FORMAT}; run `stoker calibrate` again"
        )
    if model is not None and model not in (found.model, found.fingerprint):
        raise CalibrationError(
            f"--calibration {path}: is for the model {found.model} ({found.fingerprint}), not for {model}; run "
            f"`stoker calibrate {model}`"
        )
    check_calibration(found, f"--calibration {path}")
    return found


def check_calibration(found: Calibration, where: str) -> None:
    """Raise CalibrationError if a number is impossible. The message names the field."""
    step, shape = found.step, found.shape
    if len(step.knots) != len(step.knot_s) or not step.knots or sorted(set(step.knots)) != step.knots:
        raise CalibrationError(f"{where}: step.knots must ascend, and step.knot_s must have one time for each")
    if step.knots[0] < 1:
        raise CalibrationError(f"{where}: step.knots[0]={step.knots[0]}: must be at least 1")
    positive: dict[str, float] = {
        **{f"shape.{name}": getattr(shape, name) for name in shape.__struct_fields__ if name != "steps_ahead"},
        **{f"step.knot_s[{i}]": value for i, value in enumerate(step.knot_s)},
        **{f"step.jitter[{i}]": value for i, value in enumerate(step.jitter)},
        "transfer.bytes_per_s": found.transfer.bytes_per_s,
        **{f"tiers.{name}.bytes_per_s": tier.bytes_per_s for name, tier in found.tiers.items()},
    }
    not_negative: dict[str, float] = {
        "shape.steps_ahead": shape.steps_ahead,
        **{f"step.{name}": getattr(step, name) for name in ("row_s", "context_s", "attention_s")},
        **{f"host.{name}": getattr(found.host, name) for name in found.host.__struct_fields__},
        "transfer.latency_s": found.transfer.latency_s,
        **{f"tiers.{name}.latency_s": tier.latency_s for name, tier in found.tiers.items()},
        "speculation.drafts": found.speculation.drafts,
    }
    for name, value in positive.items():
        most = _MOST.get(name, 1e15)
        if not 0 < value <= most:
            raise CalibrationError(f"{where}: {name}={value}: must be above 0 and at most {most:g}")
    for name, value in not_negative.items():
        if not 0 <= value < 1e15:
            raise CalibrationError(f"{where}: {name}={value}: must not be negative")
    for name, share in (
        ("speculation.acceptance", found.speculation.acceptance),
        ("residuals.range_share", found.residuals.range_share),
    ):
        if not 0 <= share < 1:
            raise CalibrationError(f"{where}: {name}={share}: must be from 0 to below 1")


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write the file, in place of an older one only when it is complete."""
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=1)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(text + b"\n")
        scratch.replace(path)
    except OSError as wrong:
        scratch.unlink(missing_ok=True)
        raise CalibrationError(f"--output {path}: cannot be written: {wrong.strerror}") from wrong


def scaled(step: StepModel, factor: float) -> StepModel:
    """Return the model of a worker whose steps take `factor` times as long."""
    values: dict[str, Any] = {name: getattr(step, name) * factor for name in ("row_s", "context_s", "attention_s")}
    return msgspec.structs.replace(step, knot_s=[value * factor for value in step.knot_s], **values)
