"""Frees the memory of engines that are not used any more. A training runs several engines, one after the other."""

from __future__ import annotations

import gc

import torch


def release_engines() -> None:
    """Free all engines without an owner. Engines exempt their objects from garbage collection, because in a server they
    live as long as the process."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
