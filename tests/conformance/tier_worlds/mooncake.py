"""The Mooncake tier, with a master of its own. Skipped if Mooncake's package or its libraries are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kv.mooncake_worker import PATIENCE_S, calls_take
from tier_world import TierWorld

from stoker.base.config import StoreSettings
from stoker.kv.mooncake.master import MooncakeMaster, is_installed


def mooncake(tmp_path: Path) -> Iterator[TierWorld]:
    if not is_installed():
        pytest.skip("Mooncake's client, or a library that it needs, is not installed")
    with ExitStack() as patience, MooncakeMaster(tmp_path / "master.log", lease_ms=200, client_ttl_s=4) as master:
        patience.enter_context(calls_take(PATIENCE_S))
        settings = StoreSettings(mooncake_master=master.address, mooncake_segment_gib=0.125)
        yield TierWorld(
            "mooncake", lambda num_blocks: settings, is_exact=False, outlives_writers=False, hurry=patience.close
        )


WORLDS = (mooncake,)
