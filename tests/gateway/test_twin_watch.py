"""A real gateway with the live twin, before mock workers of which one is slow."""

from __future__ import annotations

import asyncio
import gc
import warnings
from pathlib import Path

import pytest
from mocks import MockWorker, Script, chunk, streams, usage_chunk
from test_build import BODY, built, serving

from stoker.base.errors import ConfigError
from stoker.gateway.build import build_gateway
from stoker.gateway.config import load
from stoker.gateway.http import HttpRequest


def streaming(pause_s: float) -> Script:
    whole, stream = serving(), streams(chunk("Hi"), usage_chunk(100, 0, 1), b"data: [DONE]\n\n")

    async def script(worker: MockWorker, request: HttpRequest) -> None:
        if request.path == b"/v1/chat/completions":
            await asyncio.sleep(pause_s)
            await stream(worker, request)
        else:
            await whole(worker, request)

    return script


def test_a_slow_worker_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        settings = {"twin.enabled": True, "store": "none", "routing.policy": "round_robin"}
        async with built(tmp_path, settings, [streaming(0), streaming(0), streaming(0.25)]) as world:
            slow = world.workers[2].url.removeprefix("http://")

            async def page() -> str:
                return (await world.ask("/metrics", method="GET"))[2].decode()

            async def asked_and_named() -> bool:
                await asyncio.gather(*(world.ask(body={**BODY, "stream": True}) for _ in range(6)))
                return f'stoker_gateway_worker_slow{{worker="{slow}"}} 1' in await page()

            for _ in range(60):
                if await asked_and_named():
                    break
            text = await page()
            assert f'stoker_gateway_worker_slow{{worker="{slow}"}} 1' in text
            for worker in world.workers[:2]:
                assert f'stoker_gateway_worker_slow{{worker="{worker.url.removeprefix("http://")}"}} 0' in text

    asyncio.run(main())
    assert "worker_slow" in [record.getMessage() for record in caplog.records]


def test_a_wrong_calibration_is_refused(tmp_path: Path) -> None:
    """Before anything is opened, such as the store."""
    file, store = tmp_path / "calibration.json", tmp_path / "store.db"
    file.write_text("{}")
    gc.collect()  # what earlier tests left
    with warnings.catch_warnings(record=True) as left_open:
        warnings.simplefilter("always")
        with pytest.raises(ConfigError, match="not a calibration file"):
            build_gateway(load(None, {"twin.enabled": True, "twin.calibration": str(file), "store": str(store)}))
        gc.collect()
    assert [str(one.message) for one in left_open] == []
    assert not store.exists()
