"""What a model family defines, and the registry where it is found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from torch import Tensor, nn

from stoker.base.errors import ModelFilesError
from stoker.base.registry import Registry
from stoker.layers.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Rule:
    """The checkpoint's tensor `source` is rows [first, first + count) of the parameter `target`; count None: all of it."""

    source: str
    target: str
    first: int = 0
    count: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine has to know of any model."""

    vocab_size: int
    max_positions: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_heads: int
    active_weights: int  # of the products that one token goes through, the head's apart


class Model(Protocol):
    """An nn.Module of one family. Its parameters are empty until `weights.load` has followed the family's rules."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """[tokens, hidden]: what the head, and a drafter, look at."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""

    def pack(self) -> None:
        """Once, after loading: weights as the kernels want them."""

    @property
    def bytes_per_token(self) -> int:
        """What a forward takes at most beside weights and KV, for each of its tokens."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def buffers(self) -> Iterator[Tensor]: ...


class ModelFamily(Protocol):
    """`@MODELS.register("XForCausalLM")` stands on one of these: built from the checkpoint's config.json."""

    shape: ModelShape
    rules: list[Rule]
    ignored: frozenset[str]  # checkpoint tensors that are known and not wanted

    def __init__(self, hf: Mapping[str, Any]) -> None: ...

    def build(self, num_positions: int) -> Model:
        """The model with empty parameters; `num_positions` is the longest context that will be served."""


MODELS: Registry[type[ModelFamily]] = Registry("model architecture", "stoker.models")


def family_of(hf: Mapping[str, Any], where: str) -> ModelFamily:
    architectures = hf.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and name in MODELS:
            return MODELS.get(name)(hf)
    raise ModelFilesError(
        f"{where}: architectures {architectures!r} are not served; those that are: {', '.join(MODELS)}",
        code="unknown_architecture",
    )


def field(hf: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """A field of config.json, checked: a wrong one is named, not met later as a strange shape. One that is null is not there."""
    value: Any = hf.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelFilesError(f"config.json: {name!r} is missing")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelFilesError(f"config.json: {name!r} must be {kind.__name__}, found {value!r}")
    if isinstance(value, int) and kind is int and value < 1:  # all of them are sizes
        raise ModelFilesError(f"config.json: {name!r} must be at least 1, found {value}")
    if isinstance(value, float) and not 0 < value < inf:  # all of them are factors
        raise ModelFilesError(f"config.json: {name!r} must be more than 0, found {value}")
    return value
