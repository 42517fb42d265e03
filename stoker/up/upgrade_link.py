"""UpgradeLink: runs `stoker upgrade` for the fleet's own gateway when the dashboard asks for it.

The gateway restarts no process, because it does not know who runs the workers. `stoker up` does, and tells the gateway by asking.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import msgspec

from stoker.proto.admin_api import (
    ADMIN_UPGRADE_HOLD_PATH,
    ADMIN_UPGRADE_PATH,
    ADMIN_UPGRADE_RELEASE_PATH,
    UpgradeStatus,
    decode_upgrade_status,
)

_POLL_S = 1.0
_ANSWER_S = 5.0
_LINE_BYTES = 1 << 20
_TOLD = (0, 1)  # exit codes of an upgrade that has begun


@dataclass(slots=True, eq=False)
class UpgradeLink:
    """Follows the wishes of one gateway until it is cancelled.

    `command` returns what runs an upgrade; the names of workers are added to it.
    """

    gateway_url: Callable[[], str]  # it may move; empty until it is known
    admin_token: str
    command: Callable[[], Sequence[str]]
    tell: Callable[[str], None]
    _board: str = ""
    _done: int = 0  # the number of the last wish that was carried out

    async def run(self) -> None:
        headers = {"Authorization": f"Bearer {self.admin_token}"}
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while True:
                await asyncio.sleep(_POLL_S)
                if not (url := self.gateway_url()):
                    continue
                # A gateway that restarts does not answer; the supervisor looks after it.
                with suppress(TimeoutError, aiohttp.ClientError, msgspec.MsgspecError):
                    async with session.get(f"{url}{ADMIN_UPGRADE_PATH}?process=0&follows=1", ssl=False) as answer:
                        answer.raise_for_status()
                        status = decode_upgrade_status(await answer.read())
                    await self._follow(status, session, url)

    async def _follow(self, status: UpgradeStatus, session: aiohttp.ClientSession, url: str) -> None:
        if status.board != self._board:
            self._board, self._done = status.board, 0
        if status.number > self._done:
            self._done = status.number
            if reason := await self._upgrade(status.workers):
                query = {"holder": "stoker up", "outcome": f"stopped: {reason}"}
                for path in (ADMIN_UPGRADE_HOLD_PATH, ADMIN_UPGRADE_RELEASE_PATH):
                    async with session.post(url + path, params=query, ssl=False) as answer:
                        await answer.read()

    async def _upgrade(self, workers: Sequence[str]) -> str:
        """Run an upgrade. Return why it could not begin, or an empty text: then it has told the gateway itself how it ended."""
        self.tell(f"upgrade: asked for in the dashboard, of {', '.join(workers) or 'all workers'}")
        pipe, nothing, same = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL, asyncio.subprocess.STDOUT
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command(), *workers, stdin=nothing, stdout=pipe, stderr=same, limit=_LINE_BYTES
            )
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        last = ""
        try:
            assert process.stdout is not None
            while line := await process.stdout.readline():
                last = line.decode(errors="replace").strip() or last
                self.tell(f"upgrade: {last}")
            code = await process.wait()
        finally:
            if process.returncode is None:  # the fleet stops
                process.kill()
                await process.wait()
        return "" if code in _TOLD else last or f"it ended with code {code}"


def upgrade_command(gateway_url: str, admin_token_file: str) -> list[str]:
    """Return the command that upgrades the workers of a gateway which `stoker up` runs on this machine."""
    stoker = [sys.executable, "-m", "stoker.cli.main"]
    return [*stoker, "upgrade", "--url", gateway_url, "--admin-token-file", admin_token_file]
