"""Read a GGUF file: its metadata, and rows of its tensors.

The header is parsed here. The reader of the `gguf` package makes several numpy arrays for each string of the vocabulary (seconds
for a small model) and trusts the lengths in a damaged file. This module does not know what the tensors mean.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from stoker.base.errors import ModelFilesError

QUANT_TYPES = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q8_0,
)

# Types whose weights are integers with a scale, and perhaps a minimum, per group of 32.
GROUPED_TYPES = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0)
GROUP = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32

T = TypeVar("T")


@dataclass(frozen=True)
class GgufTensor:
    """The place of a tensor in the file, and how it is stored."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first, as in numpy and safetensors; GGUF stores the reverse
    offset: int
    num_bytes: int


class GroupedRows(NamedTuple):
    """Rows of a quantised tensor: the values are codes * scale + minimum. Each group of inputs has a scale and a minimum."""

    codes: npt.NDArray[np.int8]  # [rows, ins]
    scale: npt.NDArray[np.float16]  # [rows, groups]
    minimum: npt.NDArray[np.float16]  # [rows, groups]


@dataclass(frozen=True, eq=False)
class GgufFile:
    """An open GGUF file. It is memory-mapped for the life of this object."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: mmap.mmap

    def get(self, key: str, kind: type[T]) -> T:
        """Return a metadata value that must be present."""
        value = self.find(key, kind)
        if value is None:
            raise damaged(self.path, f"its metadata has no {key}")
        return value

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return a metadata value, or None if it is absent."""
        value = self.metadata.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and kind is float:
            value = float(value)
        if value is not None and not isinstance(value, kind):
            raise damaged(self.path, f"{key} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        found = self.get(key, list)
        if not all(isinstance(item, str) for item in found):
            raise damaged(self.path, f"{key} is not a list of strings")
        return found

    def rows(self, tensor: GgufTensor, order: npt.NDArray[np.intp]) -> npt.NDArray[np.float32]:
        """Return the rows `order` of `tensor` as float32. A vector has one value per row."""
        num_rows = tensor.shape[0]
        raw = np.frombuffer(self.data, np.uint8, tensor.num_bytes, tensor.offset).reshape(num_rows, -1)
        with np.errstate(invalid="ignore", over="ignore"):  # scales in a damaged file; the caller checks the values
            values = dequantize(_as_stored(raw[order], tensor.type), tensor.type)
        return np.ascontiguousarray(values, np.float32).reshape(len(order), *tensor.shape[1:])

    def groups(self, tensor: GgufTensor, order: npt.NDArray[np.intp]) -> GroupedRows:
        """Return the rows `order` of a `tensor` of one of GROUPED_TYPES, as they are stored."""
        num_rows, num_ins = tensor.shape
        raw = np.frombuffer(self.data, np.uint8, tensor.num_bytes, tensor.offset).reshape(
            num_rows, num_ins // GROUP, -1
        )
        blocks = raw[order]
        scale = blocks[..., :2].copy().view(np.float16)[..., 0]
        minimum = np.zeros_like(scale)
        if tensor.type is GGMLQuantizationType.Q8_0:
            return GroupedRows(blocks[..., 2:].reshape(len(order), num_ins).view(np.int8), scale, minimum)
        codes = np.concatenate([blocks[..., -GROUP // 2 :] & 15, blocks[..., -GROUP // 2 :] >> 4], axis=-1).view(
            np.int8
        )
        if tensor.type is GGMLQuantizationType.Q4_0:
            codes -= 8
        else:
            minimum = blocks[..., 2:4].copy().view(np.float16)[..., 0]
        return GroupedRows(codes.reshape(len(order), num_ins), scale, minimum)


def _as_stored(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[Any]:
    if kind is GGMLQuantizationType.F32:
        return raw.view(np.float32)
    if kind is GGMLQuantizationType.F16:
        return raw.view(np.float16)
    return raw


def damaged(path: Path, what: str) -> ModelFilesError:
    return ModelFilesError(f"{path} is not a valid GGUF file: {what}. Download it again, or use another file")


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file, and read and check its header."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise damaged(path, "it is empty") from error
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror or error}") from error
    return _parse(path, data)


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(path, data)
    if cursor.take(4) != b"GGUF":
        raise damaged(path, "it does not begin with 'GGUF'")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise damaged(path, f"its format version is {version}; supported are {_VERSIONS}")
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    found = [cursor.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise damaged(path, f"its alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, kind, shape, offset in found:
        tensors[name] = tensor = _place(path, name, kind, shape, start + offset)
        if tensor.offset + tensor.num_bytes > len(data):
            raise damaged(
                path,
                f"it has {len(data)} bytes, but its tensor {name} ends at byte "
                f"{tensor.offset + tensor.num_bytes}: the file is truncated",
            )
    if len(tensors) != num_tensors:
        raise damaged(path, "two of its tensors have the same name")
    return GgufFile(path, metadata, tensors, data)


def _place(path: Path, name: str, raw_type: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
    known = {int(kind) for kind in GGMLQuantizationType}
    type_name = GGMLQuantizationType(raw_type).name if raw_type in known else f"number {raw_type}"
    if raw_type not in known or GGMLQuantizationType(raw_type) not in QUANT_TYPES:
        raise ModelFilesError(
            f"{path}: tensor {name} has the type {type_name}, which is not supported. Supported are "
            f"{', '.join(kind.name for kind in QUANT_TYPES)}. Use a GGUF file of the model in one of these types (often "
            "Q8_0), or the original folder with safetensors"
        )
    kind = GGMLQuantizationType(raw_type)
    block_numbers, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or min(shape) < 1 or shape[-1] % block_numbers:
        raise damaged(path, f"tensor {name} of type {kind.name} has the shape {shape}")
    return GgufTensor(name, kind, shape, offset, math.prod(shape) // block_numbers * block_bytes)


class _Cursor:
    """A read position in the header. It never moves past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.at = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.at + num_bytes
        if end > len(self._data):
            raise damaged(
                self._path,
                f"it has {len(self._data)} bytes, but its header needs {end}: it is truncated or corrupt",
            )
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def number(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0])

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise damaged(self._path, f"a string before byte {self.at} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            code = _SCALARS[kind]
            return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        raise damaged(self._path, f"the metadata before byte {self.at} has the unknown type {kind}")

    def array(self, kind: int, count: int) -> list[Any]:
        if kind in _SCALARS:
            code = _SCALARS[kind]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"))))
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        raise damaged(self._path, f"a list before byte {self.at} has items of the unknown type {kind}")

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self.string()
        num_dimensions = self.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise damaged(self._path, f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(num_dimensions))[::-1]
        return name, self.number("I"), shape, self.number("Q")
