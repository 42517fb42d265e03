"""Builds the part of a gateway that is durable: ledger, keys, limits, stored objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from stoker.base.long_task import TaskErrors
from stoker.gateway.admission.api_keys import ApiKeys
from stoker.gateway.admission.budgets import spent_names
from stoker.gateway.admission.key_watch import KeyWatch, NoKeyWatch
from stoker.gateway.admission.limit_leases import LimitLeases, NoLeases
from stoker.gateway.admission.prices import PriceList
from stoker.gateway.config import GatewayConfig
from stoker.gateway.objects.tenant_objects import NoObjects, TenantObjects
from stoker.gateway.records.meter import Meter, NoMeter
from stoker.gateway.records.retention import Retention
from stoker.gateway.records.usage_row import UsageRow
from stoker.gateway.store.location import StoreLocation
from stoker.gateway.store.store import Store
from stoker.gateway.store.store_threads import StoreThreads
from stoker.gateway.store.watched import WatchedStore


@dataclass(frozen=True, slots=True)
class DurableParts:
    """The components that read or write the store. Without a store they do nothing."""

    store: WatchedStore | None
    threads: StoreThreads | None
    prices: PriceList
    meter: Meter | NoMeter
    key_watch: KeyWatch | NoKeyWatch
    leases: LimitLeases | NoLeases
    objects: TenantObjects | NoObjects
    retention: Retention

    @property
    def works(self) -> bool:
        return self.store is None or self.store.trouble is None


def build_durable_parts(
    config: GatewayConfig,
    keys: ApiKeys,
    model_of: Callable[[str | None], str],
    name: str,
    clock: Callable[[], float],
    errors: TaskErrors,
) -> DurableParts:
    """Open the store, and create what uses it. `model_of` returns the served model that a request names."""
    location = config.store_location
    store = None if location is None else location.open()
    prices = PriceList(config.price)
    meter = _meter(config, location, store, prices, keys)
    threads = None if store is None else StoreThreads(store)
    key_watch = NoKeyWatch() if threads is None else KeyWatch(keys, threads, errors)
    leases = NoLeases() if threads is None else LimitLeases(threads, meter.identity, clock, errors=errors)
    objects = _objects(config, threads, keys, name, model_of, clock, errors)
    retention = Retention(threads, config.meter.keep_days, errors=errors)
    return DurableParts(store, threads, prices, meter, key_watch, leases, objects, retention)


def _meter(
    config: GatewayConfig,
    location: StoreLocation | None,
    store: Store | None,
    prices: PriceList,
    keys: ApiKeys,
) -> Meter | NoMeter:
    if location is None or store is None:
        return NoMeter()
    return Meter(store, location.slots_path, config.meter, prices, partial(_budgets_of, keys))


def _budgets_of(keys: ApiKeys, row: UsageRow) -> list[str]:
    key = keys.settings_of(row.key_id)
    return [] if key is None else spent_names(key, row.session, row.time_s)


def _objects(
    config: GatewayConfig,
    threads: StoreThreads | None,
    keys: ApiKeys,
    name: str,
    model_of: Callable[[str | None], str],
    clock: Callable[[], float],
    errors: TaskErrors,
) -> TenantObjects | NoObjects:
    if threads is None:
        return NoObjects()
    return TenantObjects(
        threads,
        keys,
        config.responses,
        config.batch,
        name=name,
        max_body_bytes=int(config.listen.max_body_mib * (1 << 20)),
        max_held_bytes=int(config.listen.held_body_mib * (1 << 20)),
        model_of=model_of,
        clock=clock,
        errors=errors,
    )
