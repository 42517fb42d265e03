"""Follows the API keys in the store, so that created and revoked keys take effect without a restart."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TypeAlias

from stoker.base.errors import ConfigError, Overloaded
from stoker.base.log import EventLog
from stoker.base.long_task import TaskErrors, repeat
from stoker.gateway.admission.api_keys import ApiKeys
from stoker.gateway.admission.key_store import KeyStore, key_counts, valid_keys
from stoker.gateway.key_settings import KeySettings
from stoker.gateway.store.store import StoreTimeout, StoreUnavailable, Transaction
from stoker.gateway.store.store_threads import StoreThreads

REFRESH_S = 2.0

# The numbers of keys and of revoked ones, the valid keys, and what is wrong with those that cannot be read.
_Changed: TypeAlias = tuple[tuple[int, int], list[KeySettings], list[str]]

log = EventLog("keys")


class NoKeyWatch:
    """Stands in for KeyWatch where there is no store."""

    def start(self) -> None:
        pass

    async def close(self) -> None:
        pass


class KeyWatch:
    """Reads the keys of the store into `keys`, now and then again after every change."""

    def __init__(self, keys: ApiKeys, threads: StoreThreads, errors: TaskErrors | None = None) -> None:
        self._keys = keys
        self._errors = errors or TaskErrors()
        self._threads = threads
        self._seen: tuple[int, int] | None = None
        self._task: asyncio.Task[None] | None = None
        KeyStore(threads.store)  # declares the tables
        try:
            with threads.store.snapshot() as reader:
                self._take(self._changed(reader))
        except StoreUnavailable as error:
            raise ConfigError(error.detail) from error

    def start(self) -> None:
        self._task = asyncio.create_task(repeat("keys", self._refresh, self._errors))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _refresh(self) -> None:
        await asyncio.sleep(REFRESH_S)
        with suppress(Overloaded, StoreTimeout):  # the keys that are known stay valid until the store is back
            self._take(await self._threads.read(self._changed))

    def _changed(self, reader: Transaction) -> _Changed | None:
        counts = key_counts(reader)
        return None if counts == self._seen else (counts, *valid_keys(reader))

    def _take(self, changed: _Changed | None) -> None:
        if changed is None:
            return
        first, (self._seen, valid, wrong) = self._seen is None, changed
        num_keys, num_revoked = self._seen
        self._keys.set_stored(valid, any_key=num_keys > 0)
        for reason in wrong:
            log.error("key_not_read", reason=reason)
        if num_keys or not first:
            log.event("keys_read", valid=len(valid), revoked=num_revoked)
