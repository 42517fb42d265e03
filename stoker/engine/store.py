"""Build the engine's KvStore from its settings: the tiers, nearest first, and the client that pulls from other workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from stoker.base.config import EngineSettings, StoreSettings
from stoker.base.ids import BlockKey
from stoker.kv.blocks.layout import KvSet
from stoker.kv.blocks.transfer import KvIdentity
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.peer_client import PeerClient
from stoker.kv.store.block_io import block_io
from stoker.kv.store.buffer_pool import HEADROOM_BYTES
from stoker.kv.store.kv_store import KvStore, StoreContext, TierEvent
from stoker.kv.store.measured_tier import MeasuredTier
from stoker.kv.store.other_stores import OtherStores
from stoker.kv.store.set_store import SetParts
from stoker.kv.store.tiers.tier import TierContext, build_tier, tier_names


def build_store(
    settings: EngineSettings,
    kv: DeviceKv,
    identity: KvIdentity,
    fingerprint: str,
    prefill_tokens_per_s: Callable[[], float | None],
    wake: Callable[[], None],
    *,
    share: float = 1.0,
    others: OtherStores | None = None,
    reports_events: bool = True,
) -> KvStore:
    """Build the store of a rank. `share` is its part of the capacity of the tiers, `others` are the stores of the other
    ranks. Only the first rank reports events, because the blocks of all ranks have the same keys."""
    events: deque[TierEvent] = deque(maxlen=None if reports_events else 0)

    def on_evicted(tier: str, keys: Sequence[BlockKey]) -> None:
        events.append(TierEvent(tier, removed=tuple(keys)))
        wake()

    def on_forgotten(tier: MeasuredTier, keys: Sequence[BlockKey]) -> None:
        store.offer_again(tier, keys)

    block_bytes = [one.layout.block_bytes for one in kv.layout.sets]
    parts = []
    for number, (one, memory) in enumerate(zip(kv.layout.sets, kv.sets, strict=True)):
        # Each block is stored once per KV set, so that every set needs its share of a tier.
        part = share * block_bytes[number] / sum(block_bytes)
        suffix = f":{one.reach.name}" if number else ""
        tiers = _set_tiers(
            settings.store, one, fingerprint, suffix, part, _ignore if number else on_evicted, on_forgotten
        )
        parts.append(SetParts(tiers, block_io(memory), block_bytes[number], one.reach))
    store = KvStore(
        parts,
        PeerClient(kv, identity, settings.handoff),
        StoreContext(fingerprint, kv.layout.block_tokens, kv.like.is_cuda, prefill_tokens_per_s, wake),
        events,
        others,
    )
    return store


def _set_tiers(
    settings: StoreSettings,
    one: KvSet,
    fingerprint: str,
    suffix: str,
    share: float,
    on_evicted: Callable[[str, Sequence[BlockKey]], None],
    on_forgotten: Callable[[MeasuredTier, Sequence[BlockKey]], None],
) -> list[MeasuredTier]:
    """Return the tiers of one KV set. `suffix` distinguishes their fingerprint and names from those of the first set. Ranks
    with other heads or layers have another fingerprint too."""
    tiers: dict[str, MeasuredTier] = {}

    def add(name: str) -> None:
        context = TierContext(
            fingerprint + suffix + one.layout.shard_name,
            one.layout,
            lambda keys: on_evicted(name, keys),
            lambda keys: on_forgotten(tiers[name], keys),
            HEADROOM_BYTES,
            share=share,
        )
        tier = build_tier(name, settings, context)
        if tier is not None:
            tiers[name] = MeasuredTier(name + suffix, tier)

    for name in tier_names():
        add(name)
    return list(tiers.values())


def _ignore(tier: str, keys: Sequence[BlockKey]) -> None:
    """The other KV sets report no events: their blocks have the keys of the first set."""
