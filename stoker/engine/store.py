"""Settings -> the KvStore of this engine: the tiers that they ask for, in order, and the way to other workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from stoker.base.config import EngineSettings
from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import KvIdentity
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.peer_client import PeerClient
from stoker.kv.store.block_io import ROOM_BYTES, block_io
from stoker.kv.store.kv_store import KvStore, StoreContext, TierEvent
from stoker.kv.store.tier_use import TierUse
from stoker.kv.store.tiers.tier import TIERS, TierContext

_CHAIN = ("host", "disk", "mooncake")  # the nearest first; others come after them


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
    uses: dict[str, TierUse] = {}

    def lost(name: str, keys: Sequence[BlockKey]) -> None:
        events.append(TierEvent(name, removed=tuple(keys)))
        wake()

    def forgotten(name: str, keys: Sequence[BlockKey]) -> None:
        store.offer_again(uses[name], keys)

    for name in sorted(TIERS, key=lambda name: (_CHAIN.index(name) if name in _CHAIN else len(_CHAIN), name)):
        context = TierContext(fingerprint, layout, partial(lost, name), partial(forgotten, name), ROOM_BYTES)
        tier = TIERS.get(name)(settings.store, context)
        if tier is not None:
            uses[name] = TierUse(name, tier)
    store = KvStore(
        list(uses.values()),
        PeerClient(kv, identity, settings.handoff),
        block_io(kv),
        StoreContext(
            fingerprint, layout.block_tokens, layout.block_bytes, kv.blocks.is_cuda, prefill_tokens_per_s, wake
        ),
        events,
    )
    return store
