"""UpgradeHold: lets one `stoker upgrade` of a fleet run at a time, and shows its progress in the dashboard."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from urllib.parse import urlencode

from stoker.base.errors import ConfigError
from stoker.cli.gateway_admin import GatewayAdmin, GatewayRefused
from stoker.proto.admin_api import ADMIN_UPGRADE_HOLD_PATH, ADMIN_UPGRADE_RELEASE_PATH

_RENEW_S = 5.0
_SECOND = "upgrade_running"  # the code with which a gateway refuses another upgrade
_NOT_FOUND = 404


class UpgradeHold:
    """Holds the gateway's upgrade board, and renews it in a thread of its own while a worker is restarted.

    A gateway of an older version has no board: then nothing keeps a second upgrade from running. A gateway that was restarted gets
    the hold with the next renewal.
    """

    def __init__(self, admin: GatewayAdmin, tell: Callable[[str], None]) -> None:
        self._admin = admin
        self._tell = tell
        self._name = f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"
        self._stopping = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="upgrade-hold", daemon=True)
        self._lost: GatewayRefused | None = None
        self._outcome = "interrupted"

    def __enter__(self) -> UpgradeHold:
        """Raise ConfigError if another upgrade runs."""
        try:
            self._hold("")
        except GatewayRefused as refused:
            if refused.status != _NOT_FOUND:
                raise
        else:
            self._renewing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._renewing.is_alive():
            return
        self._stopping.set()
        self._renewing.join()
        with suppress(ConfigError):
            self._post(ADMIN_UPGRADE_RELEASE_PATH, outcome=self._outcome)

    def say(self, line: str) -> None:
        """Tell the operator, in the terminal and on the dashboard."""
        self._tell(line)
        if self._renewing.is_alive():
            self._renew_once(line)

    def ended(self, outcome: str) -> None:
        """Note how the upgrade has ended. Without this it counts as interrupted."""
        self._outcome = outcome

    def check(self) -> None:
        """Raise ConfigError if another upgrade has begun in the meantime, after the gateway was restarted."""
        if self._lost is not None:
            raise self._lost

    def _renew(self) -> None:
        while not self._stopping.wait(_RENEW_S):
            self._renew_once("")

    def _renew_once(self, line: str) -> None:
        try:
            self._hold(line)
        except GatewayRefused as refused:
            if refused.gateway_code == _SECOND:
                self._lost = refused
        except ConfigError:
            return  # the gateway restarts; the upgrade itself notices if it stays away

    def _hold(self, line: str) -> None:
        self._post(ADMIN_UPGRADE_HOLD_PATH, line=line)

    def _post(self, path: str, **query: str) -> None:
        self._admin.post(f"{path}?{urlencode({'holder': self._name, **query})}")
