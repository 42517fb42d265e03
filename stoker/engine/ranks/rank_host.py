"""The contract of what starts the other ranks of an engine, and the checks of what ranks do not support."""

from __future__ import annotations

from typing import Protocol

from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.engine.memory import ResolvedSettings
from stoker.engine.part import ModelSource
from stoker.engine.ranks.place import ALONE_PLACE, RankPlace
from stoker.engine.runner import Runner, StepRunner
from stoker.models.family import ModelFamily


class RankHost(Protocol):
    """Starts and ends the ranks of an engine, and gives rank 0 its place among them."""

    def connect(
        self, source: ModelSource, family: ModelFamily, settings: EngineSettings, resolved: ResolvedSettings
    ) -> RankPlace:
        """Start the ranks, and return the place of rank 0. Raises StokerError, which names the rank that fails."""

    def drive(self, runner: Runner) -> StepRunner:
        """Wait until all ranks are ready, and return the runner that drives them."""

    def close(self) -> None:
        """End all ranks."""


class NoRanks:
    """An engine on one device."""

    def connect(
        self, source: ModelSource, family: ModelFamily, settings: EngineSettings, resolved: ResolvedSettings
    ) -> RankPlace:
        return ALONE_PLACE

    def drive(self, runner: Runner) -> StepRunner:
        return runner

    def close(self) -> None:
        pass


def check_ranks(settings: EngineSettings, resolved: ResolvedSettings) -> None:
    """Raise ConfigError for settings that do not work with several ranks."""
    layout, store = resolved.layout, settings.store
    if layout.num_ranks == 1:
        return
    refused = {
        "--kv-host-gib": store.host_gib > 0,
        "--kv-disk": store.disk_dir is not None,
        "--kv-mooncake": store.mooncake_master is not None,
        "--kv-tier": bool(store.tiers),
        "--role prefill and --kv-port": settings.handoff.serves,
        "--drafter with a draft model": resolved.drafters.draft_model is not None,
    }
    if found := [name for name, is_given in refused.items() if is_given]:
        raise ConfigError(f"{layout}: {', '.join(found)} needs a single rank; remove it, or --tp, --pp, --ep and --cp")
