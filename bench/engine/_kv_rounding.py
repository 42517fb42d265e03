"""Reads texts with rounded KV and compares the results. Imports torch: import this module inside `run`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.ids import BlockId, Row
from stoker.engine.inputs import build_inputs
from stoker.engine.llm import LLM
from stoker.kernels import rope_write
from stoker.kernels.attention import paged_attention
from stoker.kernels.kv_pages import dequantise, kv_write, quantise
from stoker.layers import attention as attention_layer
from stoker.sched.plan import BlockTableChange, NewRow, Span, StepPlan
from stoker.sched.request import SamplingParams

Rounding = Callable[[Tensor], Tensor]
Rounded = Callable[[Tensor, Tensor, Tensor], Tensor]
_MOST = 448.0  # the largest value of e4m3


def _fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn).float() * scale


def stored_as(dtype: torch.dtype) -> Rounding:
    """Return the rounding of the cache itself: 8 bits with a scale per token and head."""
    return lambda x: dequantise(*quantise(x, dtype), x.dtype)


def power_of_two(x: Tensor) -> Tensor:
    return _fp8(x, (x.abs().amax(-1, keepdim=True) / _MOST).clamp(min=1e-30).log2().ceil().exp2())


def per_tensor(x: Tensor) -> Tensor:
    return _fp8(x, (x.abs().amax() / _MOST).clamp(min=1e-30))


def unscaled(x: Tensor) -> Tensor:
    return _fp8(x, 1.0)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to store KV."""

    title: str
    kv_dtype: str
    rounding: Rounding | None = None


def ways() -> list[Way]:
    return [
        Way("bfloat16", "bfloat16"),
        Way("float16", "float16"),
        Way("int8", "int8"),
        Way("fp8_e4m3", "fp8_e4m3"),
        Way("fp8, scale per token and head, a power of two", "auto", power_of_two),
        Way("fp8, one scale per layer, from the window itself", "auto", per_tensor),
        Way("fp8, scale 1", "auto", unscaled),
    ]


@dataclass
class Read:
    """What reading the windows gave."""

    losses: list[Tensor] = field(default_factory=list)
    best: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    layer_errors: list[list[float]] = field(default_factory=list)  # of each window

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.losses))

    @property
    def worst_layer(self) -> float:
        return max((sum(errors) / len(errors) for errors in zip(*self.layer_errors, strict=True)), default=0.0)

    def perplexity(self) -> float:
        return float(torch.cat(self.losses).mean().exp())

    def agreement(self, other: Read) -> float:
        return float((torch.cat(self.best) == torch.cat(other.best)).double().mean())

    def divergence(self, other: Read) -> float:
        """Return the mean KL divergence from the other's distributions to these."""
        parts = [
            (theirs.float().exp() * (theirs.float() - ours.float())).sum(-1)
            for ours, theirs in zip(self.logprobs, other.logprobs, strict=True)
        ]
        return float(torch.cat(parts).mean())


class Reader:
    """Reads windows of texts with an engine's model and KV cache."""

    def __init__(self, model: Path, texts: Sequence[Path], window: int, windows: int, threads: int) -> None:
        self._model, self._window, self._threads = model, window, threads
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._windows: list[list[int]] = []
        for path in texts:
            ids = tokenizer.encode(_text(path)[: 12 * window * windows]).ids
            self._windows += [ids[i * window : (i + 1) * window] for i in range(windows)]

    def read(self, kv_dtype: str, rounding: Rounding | None = None) -> Read:
        blocks = -(-self._window // 16) + 1
        settings = EngineSettings(
            device="cpu",
            dtype="float32",
            num_threads=self._threads,
            max_model_tokens=self._window,
            kv=KvSettings(16, blocks, dtype=kv_dtype),
            sched=SchedSettings(max_rows=1),
        )
        llm, found = LLM(self._model, settings), Read()
        torch.set_num_threads(self._threads)
        runner: Any = llm.built.engine._runner
        new = NewRow(Row(0), SamplingParams(), [1], 1, 10)
        change = BlockTableChange(Row(0), 0, [BlockId(i) for i in range(blocks - 1)])
        for ids in self._windows:
            plan = StepPlan([Span(Row(0), 0, len(ids), False)], list(ids), new_rows=[new], block_table_changes=[change])
            with torch.inference_mode(), _rounded(rounding), _errors(found):
                runner._rows.apply(plan)
                hidden = runner._model(build_inputs(plan, runner._rows, runner._kv).batch)[:-1]
                logprobs = runner._model.logits(hidden).float().log_softmax(-1)
            targets = torch.tensor(ids[1:])
            found.losses.append(-logprobs.gather(1, targets[:, None])[:, 0])
            found.best.append(logprobs.argmax(-1))
            found.logprobs.append(logprobs[::8].half())  # a part: all of them take gigabytes
        llm.close()
        return found


def _text(path: Path) -> str:
    with gzip.open(path, "rt") as file:
        text = file.read()
    if ".jsonl" not in path.name:
        return text
    return "\n".join(_strings(json.loads(line)) for line in text.split("\n") if line)


def _strings(value: Any) -> str:
    """Return all texts in a JSON value."""
    if isinstance(value, str):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return "\n".join(filter(None, map(_strings, items)))


@contextmanager
def _rounded(rounding: Rounding | None) -> Iterator[None]:
    """Round K and V before they are written."""
    if rounding is None:
        yield
        return
    with patch.object(rope_write, "kv_write", lambda src, pages, index: kv_write(rounding(src), pages, index)):
        yield


@contextmanager
def _errors(found: Read) -> Iterator[None]:
    """Record each layer's relative error: attention over the cache against attention over the K and V before rounding."""
    errors: list[float] = []
    attend = paged_attention
    write: Rounded = vars(rope_write)["kv_write"]  # rounding may have replaced it
    exact: list[Tensor] = []

    def keep(src: Tensor, pages: Tensor, index: Tensor) -> Tensor:
        exact.append(src)
        return write(src, pages, index)

    def compare(q: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
        result = attend(q, key, value, *others)
        query, k, v = (part.transpose(0, 1)[None] for part in (q, *exact))
        expected = scaled_dot_product_attention(query, k, v, is_causal=True, scale=others[-1], enable_gqa=True)[0]
        errors.append(float((result - expected.transpose(0, 1)).norm() / expected.norm()))
        exact.clear()
        return result

    with patch.object(rope_write, "kv_write", keep), patch.object(attention_layer, "paged_attention", compare):
        yield
    found.layer_errors.append(errors)


def attention_errors() -> dict[str, list[tuple[str, float]]]:
    """Return errors of attention outputs on random K and V, with and without outliers."""
    torch.manual_seed(0)
    heads, tokens, dim = 8, 2048, 128
    query, key, value = (torch.randn(heads, tokens, dim) for _ in range(3))
    channel, small = torch.ones(dim), torch.ones(heads, tokens, 1)
    channel[[3, 67]] = 20.0  # a few channels of K are large in many models
    small[:, :4] = 1e-3  # the values of the first tokens are small in many models
    cases = {
        "random": (key, value),
        "K with two channels of 20": (key * channel, value),
        "V of 0.001": (key, value * 1e-3),
        "V of 0.001 in four tokens": (key, value * small),
        "K of 300": (key * 300, value),
    }
    roundings: list[tuple[str, Rounding]] = [
        ("bfloat16", lambda x: x.bfloat16().float()),
        ("int8", stored_as(torch.int8)),
        ("fp8_e4m3", stored_as(torch.float8_e4m3fn)),
        ("fp8, power of two", power_of_two),
        ("fp8, one per tensor", per_tensor),
        ("fp8, scale 1", unscaled),
    ]
    found = {}
    for case, (k, v) in cases.items():
        scale = dim**-0.5 / float(k.std())
        expected = scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale)
        found[case] = [
            (title, float((scaled_dot_product_attention(query, way(k), way(v), is_causal=True, scale=scale) - expected).norm()
                          / expected.norm()))
            for title, way in roundings
        ]  # fmt: skip
    return found
