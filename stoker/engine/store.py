"""Build the engine's KvStore from its settings: the tiers, nearest first, and the client that pulls from other workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from stoker.base.config import EngineSettings
from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import KvIdentity
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.peer_client import PeerClient
from stoker.kv.store.block_io import block_io
from stoker.kv.store.buffer_pool import HEADROOM_BYTES
from stoker.kv.store.kv_store import KvStore, StoreContext, TierEvent
from stoker.kv.store.measured_tier import MeasuredTier
from stoker.kv.store.tiers.tier import TierContext, build_tier, check_tier_names, tier_names


def build_store(
    settings: EngineSettings,
    kv: DeviceKv,
    identity: KvIdentity,
    fingerprint: str,
    prefill_tokens_per_s: Callable[[], float | None],
    wake: Callable[[], None],
) -> KvStore:
    layout = kv.layout
    events: deque[TierEvent] = deque()
    tiers: dict[str, MeasuredTier] = {}

    def on_evicted(name: str, keys: Sequence[BlockKey]) -> None:
        events.append(TierEvent(name, removed=tuple(keys)))
        wake()

    def on_forgotten(name: str, keys: Sequence[BlockKey]) -> None:
        store.offer_again(tiers[name], keys)

    check_tier_names(settings.store)
    for name in tier_names():
        context = TierContext(
            fingerprint, layout, partial(on_evicted, name), partial(on_forgotten, name), HEADROOM_BYTES
        )
        tier = build_tier(name, settings.store, context)
        if tier is not None:
            tiers[name] = MeasuredTier(name, tier)
    store = KvStore(
        list(tiers.values()),
        PeerClient(kv, identity, settings.handoff),
        block_io(kv),
        StoreContext(
            fingerprint, layout.block_tokens, layout.block_bytes, kv.blocks.is_cuda, prefill_tokens_per_s, wake
        ),
        events,
    )
    return store
