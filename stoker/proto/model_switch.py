"""The request that gives a worker another model, and its answer (`/stoker/model`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_DRAIN_S = 86_400.0


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks a worker to serve another model: a folder, a .gguf file or a Hugging Face id, as on the command line."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    served_names: list[Annotated[str, msgspec.Meta(min_length=1, max_length=256)]] = []  # default: the folder's name
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DRAIN_S)] | None = None  # default: the worker's --drain-s


class ModelSwitched(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to `ModelRequest`: the names that it serves now."""

    models: list[str]
    seconds: float  # from the end of the old engine to the new one being ready


def encode_model_request(model: str, served_names: list[str], drain_s: float | None) -> bytes:
    return msgspec.json.encode(ModelRequest(model=model, served_names=served_names, drain_s=drain_s))


def decode_switched(answer: bytes) -> ModelSwitched:
    return msgspec.json.decode(answer, type=ModelSwitched)
