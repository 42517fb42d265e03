"""The contract of a model family, and the registry of families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from stoker.base import garbage
from stoker.base.errors import ModelFilesError
from stoker.base.registry import Registry
from stoker.kv.blocks.layout import KvGroup
from stoker.layers.batch import ForwardBatch
from stoker.layers.features import Tap
from stoker.layers.quant import Int8Kernel
from stoker.parallel.mesh import Mesh
from stoker.parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class SourceSlice:
    """The part of a checkpoint tensor that a rank takes: `count` entries of an axis, from `first` on. The axis has `of`
    entries. `rows`: it is taken of this slice of the first axis alone."""

    axis: int
    first: int
    count: int
    of: int
    rows: SourceSlice | None = None


@dataclass(slots=True)  # not frozen, for speed: large models have 200,000 of them
class Rule:
    """The checkpoint tensor `source`, or the slice `cut` of it, fills rows [first, first + count) of the parameter
    `target`; count None means all rows."""

    source: str
    target: str
    first: int = 0
    count: int | None = None
    cut: SourceSlice | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine needs to know about any model."""

    vocab_size: int
    hidden_size: int
    max_positions: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_heads: int
    active_weights: int  # weights in the matmuls that one token passes through, without the head


class Model(Protocol):
    """An nn.Module of one family. Its parameters are empty until `weights.load` has applied the family's rules."""

    def __call__(self, batch: ForwardBatch, taps: Sequence[Tap] = (), entering: Tensor | None = None) -> Tensor:
        """Return the hidden states [tokens, hidden] that leave the last layer. Each tap gets those of its layer; taps are
        ordered by their layers. `entering` are those of the stage before; None: this is the first stage."""

    def join(self, mesh: Mesh) -> None:
        """Give a rank's part of a model the other ranks, before its first step."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        """Convert the weights to the layout of the kernels, once after loading. `int8` is the kernel for weights that
        may be requantised to 8 bits; None: they are dequantised. `exact`: a token's result must not depend on the other
        tokens of a step."""

    @property
    def bytes_per_token(self) -> int:
        """Upper bound of a forward pass's memory per token, beside weights and KV."""

    @property
    def has_sinks(self) -> bool:
        """True if the attention of some layer has sinks (kernels/attention.py)."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def buffers(self) -> Iterator[Tensor]: ...


class ModelFamily(Protocol):
    """A model family, built from the checkpoint's config.json and registered with `@MODELS.register("XForCausalLM")`."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Tiny configurations by name, as changes to a small base config. The conformance tests build and run each of them."""
    shape: ModelShape
    kv_groups: tuple[KvGroup, ...]
    rules: list[Rule]
    # Checkpoint tensors that are known and not loaded. A name that ends with a dot stands for all that begin with it.
    ignored: frozenset[str]

    def __init__(self, hf: Mapping[str, Any]) -> None: ...

    def sharded(self, shard: Shard) -> ModelFamily:
        """Return a rank's part of the whole model: its `shape`, `rules` and `build` are those of the part. `kv_groups` say
        which layers its stage holds, and have the heads of all ranks. Raises ConfigError if the model cannot be split like this."""

    def build(self, num_positions: int) -> Model:
        """Build the model with empty parameters. `num_positions` is the longest context that will be served."""


MODELS: Registry[type[ModelFamily]] = Registry("model architecture", "stoker.models")


def family_of(hf: Mapping[str, Any], where: str) -> ModelFamily:
    """Return the family of a config.json. `where` is its path, for the error."""
    architectures = hf.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and name in MODELS:
            with garbage.paused():  # a family may have a rule for each of 200,000 tensors
                return MODELS.get(name)(hf)
    raise ModelFilesError(
        f"{where}: architectures {architectures!r} are not supported; supported are: {', '.join(MODELS)}",
        code="unknown_architecture",
    )


# The largest numbers of config.json, far above those of any model. A larger one would take all memory, or hours.
_MAX_SIZE = 2**31 - 1
_MAX_COUNTS = {
    "num_hidden_layers": 1024,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
    "num_nextn_predict_layers": 16,
    "num_mtp_modules": 16,
}


def list_field(hf: Mapping[str, Any], name: str) -> list[Any]:
    """Return a field of config.json that is a list. It is empty if the field is missing or null."""
    value = hf.get(name)
    if value is not None and not isinstance(value, list):
        raise ModelFilesError(f"config.json: {name!r} must be a list, found {value!r}")
    return value or []


def field(hf: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Return a checked field of config.json. A wrong value is reported by name here instead of appearing later as a
    strange shape. A null field counts as missing."""
    value: Any = hf.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelFilesError(f"config.json: {name!r} is missing")
    if isinstance(value, int) and abs(value) > (most := _MAX_COUNTS.get(name, _MAX_SIZE)):
        raise ModelFilesError(f"config.json: {name!r} must be at most {most}, found a larger number")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelFilesError(f"config.json: {name!r} must be {kind.__name__}, found {value!r}")
    if isinstance(value, int) and kind is int and value < 1:  # all integer fields are sizes
        raise ModelFilesError(f"config.json: {name!r} must be at least 1, found {value}")
    if isinstance(value, float) and not 0 < value < inf:  # all float fields are factors
        raise ModelFilesError(f"config.json: {name!r} must be more than 0, found {value}")
    return value
