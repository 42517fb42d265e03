"""The contract of what starts the other ranks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from stoker.base.config import EngineSettings
from stoker.engine.memory import ResolvedSettings
from stoker.engine.part import ModelSource
from stoker.engine.ranks.place import ALONE_PLACE, RankPlace
from stoker.engine.ranks.rank_kv import NoOtherKv, OtherKv
from stoker.engine.runner import Runner, StepRunner
from stoker.models.family import ModelFamily


class RankHost(Protocol):
    """Starts and ends the ranks of an engine, and gives rank 0 its place among them."""

    def connect(
        self,
        source: ModelSource,
        family: ModelFamily,
        settings: EngineSettings,
        resolved: ResolvedSettings,
        engine_id: str,
    ) -> RankPlace:
        """Start the ranks, and return the place of rank 0. Raises StokerError, which names the rank that fails."""

    def drive(self, runner: Runner) -> StepRunner:
        """Wait until all ranks are ready, and return the runner that drives them."""

    def other_kv(self, wake: Callable[[], None]) -> OtherKv:
        """Return the KV of the other ranks, after `drive`. `wake` is called from any thread when one of them has results."""

    @property
    def kv_addresses(self) -> Sequence[str]:
        """The addresses of the other ranks' KV servers, after `drive`."""

    def dismiss(self) -> None:
        """Tell the ranks of other nodes that the engine ends, and will not start again. `close` must follow."""

    def close(self) -> None:
        """End all ranks."""


class NoRanks:
    """An engine on one device."""

    def connect(
        self,
        source: ModelSource,
        family: ModelFamily,
        settings: EngineSettings,
        resolved: ResolvedSettings,
        engine_id: str,
    ) -> RankPlace:
        return ALONE_PLACE

    def drive(self, runner: Runner) -> StepRunner:
        return runner

    def other_kv(self, wake: Callable[[], None]) -> OtherKv:
        return NoOtherKv()

    @property
    def kv_addresses(self) -> Sequence[str]:
        return ()

    def dismiss(self) -> None:
        pass

    def close(self) -> None:
        pass
