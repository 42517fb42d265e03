"""Reading the load of a foreign engine over HTTP. A dialect names the probe of its workers (`Dialect.load_probe`).

Stoker workers need none: they publish load reports with their KV events.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from stoker.fleet.spec import LoadReport
from stoker.gateway.watch import scrape

Get = Callable[[bytes], Awaitable[tuple[int, bytes]]]  # path -> status, body


class LoadUnavailable(Exception):
    """The worker did not report its load. `status` is that of the last page that was requested."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class LoadProbe(Protocol):
    """Reads one worker's load. A watcher makes a new probe for its worker."""

    async def learn(self, get: Get) -> None:
        """Read data that rarely changes. Called before the first `read`, and then every `WatchSettings.learn_s`."""

    async def read(self, get: Get) -> LoadReport | None:
        """Return the current load, or None if such workers never report one. Raises LoadUnavailable."""


class NoLoadProbe:
    """Reports no load, because the worker has no load page."""

    async def learn(self, get: Get) -> None:
        pass

    async def read(self, get: Get) -> LoadReport | None:
        return None


class VllmLoadProbe:
    """Reads vLLM's `/metrics`."""

    async def learn(self, get: Get) -> None:
        pass

    async def read(self, get: Get) -> LoadReport | None:
        status, page = await get(b"/metrics")
        load = scrape.vllm_load(page) if status == 200 else None
        if load is None:
            raise LoadUnavailable(status)
        return load


class SglangLoadProbe:
    """Reads SGLang's `/v1/loads`, or `/metrics` where that is missing."""

    def __init__(self) -> None:
        self._page_tokens: int | None = None

    async def learn(self, get: Get) -> None:
        if self._page_tokens is not None:
            return
        for path in (b"/server_info", b"/get_server_info"):
            status, answer = await get(path)
            if status == 200:
                self._page_tokens = scrape.page_size(answer)
                return

    async def read(self, get: Get) -> LoadReport | None:
        status, page = await get(b"/v1/loads")
        load = scrape.sglang_loads(page, self._page_tokens) if status == 200 else None
        if load is None:
            status, page = await get(b"/metrics")
            load = scrape.sglang_load(page, self._page_tokens) if status == 200 else None
        if load is None:
            raise LoadUnavailable(status)
        return load
