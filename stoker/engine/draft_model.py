"""The draft model of an engine, from its files to its drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.base.errors import ModelFilesError
from stoker.engine.device_drafter import DeviceDrafter, PagedPlaces, ReferencePlaces
from stoker.engine.memory import ResolvedSettings
from stoker.engine.model_identity import read_hf_config
from stoker.engine.rows import RowTable
from stoker.kv.blocks.layout import KvGroup
from stoker.kv.device.device_kv import DeviceKv
from stoker.models.draft import DraftCheckpoint, DraftModel, PredictsMore
from stoker.models.eagle3_weights import Eagle3Checkpoint
from stoker.models.family import ModelFamily
from stoker.spec.choose_drafters import EAGLE3, MTP, DrafterChoice


def open_draft(folder: Path, hf: Mapping[str, Any], family: ModelFamily) -> DraftCheckpoint:
    """Return the files of a draft model for this target model. `hf` is the folder's config.json. Raises
    ModelFilesError."""
    return Eagle3Checkpoint(hf, folder, family.shape)


def open_chosen_draft(drafters: DrafterChoice, folder: Path, family: ModelFamily) -> DraftCheckpoint | None:
    """Return the files of the draft model, if there is one. `folder` is the target model's."""
    if drafters.draft_model == MTP:
        return open_own_draft(folder, family)
    if drafters.draft_model is None:
        return None
    draft_folder = Path(drafters.arguments[EAGLE3])
    return open_draft(draft_folder, read_hf_config(draft_folder), family)


def open_own_draft(folder: Path, family: ModelFamily) -> DraftCheckpoint:
    """Return the layer for drafts in the target model's own files. Raises ModelFilesError if there is none."""
    if not isinstance(family, PredictsMore):
        raise ModelFilesError(
            f"{folder}: models of this architecture have no layer for drafts; leave out the drafter 'mtp', or use eagle3:FOLDER"
        )
    return family.open_prediction(folder)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model that is ready to run."""

    model: DraftModel
    kv_group: KvGroup
    num_heads: int
    num_positions: int

    @classmethod
    def load(cls, checkpoint: DraftCheckpoint, target: Any, resolved: ResolvedSettings) -> LoadedDraft:
        """Load the weights. Raises ModelFilesError, with the name of the tensor, for weights that do not fit. `target` is the
        target model, or what a rank has of it (SplitTarget)."""
        return cls._make(checkpoint, target, resolved, resolved.device, loads=True)

    @classmethod
    def stand_in(
        cls, checkpoint: DraftCheckpoint, target: Any, resolved: ResolvedSettings, device: torch.device
    ) -> LoadedDraft:
        """Return the draft model without weights, for a device that has none."""
        return cls._make(checkpoint, target, resolved, device, loads=False)

    @classmethod
    def _make(
        cls,
        checkpoint: DraftCheckpoint,
        target: Any,
        resolved: ResolvedSettings,
        device: torch.device,
        *,
        loads: bool,
    ) -> LoadedDraft:
        default = torch.get_default_dtype()
        torch.set_default_dtype(resolved.dtype)
        try:
            with device:
                model = checkpoint.build(target, resolved.max_model_tokens)
        finally:
            torch.set_default_dtype(default)
        if loads:
            checkpoint.load(model, lambda done, total: None)
        with torch.no_grad():
            model.pack()
        return cls(model, checkpoint.kv_group, checkpoint.num_heads, resolved.max_model_tokens)

    def logits_bytes(self, max_rows: int) -> int:
        """Return the memory of the logits of one draft of each row."""
        return max_rows * self.model.logits_bytes_per_row

    @property
    def num_bytes(self) -> int:
        """The size of the weights."""
        tensors = [*self.model.buffers(), *(parameter for _name, parameter in self.model.named_parameters())]
        return sum(tensor.nbytes for tensor in tensors)

    def drafter(
        self, kv: DeviceKv, rows: RowTable, *, paged: bool, attention_dtype: torch.dtype | None = None
    ) -> DeviceDrafter:
        """Return the drafter of an engine. `paged`: with the GPU's kernels."""
        assert kv.draft is not None, "the KV has no group for a draft model"
        dtype = attention_dtype or kv.like.dtype
        in_place = kv.like.dtype == kv.blocks.dtype == dtype
        places = PagedPlaces(kv.draft, rows) if paged else ReferencePlaces(kv.draft, rows, dtype, in_place)
        return DeviceDrafter(self.model, rows, kv.draft, places, self.num_positions)
