"""`stoker upgrade`: restart the workers of a fleet one at a time, without a failed request."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from stoker.base.errors import ConfigError
from stoker.base.output import print_message, print_result
from stoker.cli.drain import find_worker
from stoker.cli.gateway_admin import GatewayAdmin, add_gateway_arguments

if TYPE_CHECKING:
    from stoker.proto.admin_api import WorkerStatus

NAME = "upgrade"
HELP = "restart the workers of a fleet one at a time"
DESCRIPTION = """Restart the workers of a fleet one at a time, such as after a new version was installed. Each one is drained, and
its requests move to other workers, and it is restarted and watched before the next one. The upgrade stops at the first worker that
does not get ready, or when requests fail. Workers of `stoker up` on this machine are restarted by it. Others need --restart."""

_GONE_S = 120.0
_POLL_S = 0.1
_FAILED = re.compile(r'stoker_gateway_requests_total\{[^}]*status="5\d\d"[^}]*\} (\S+)')
_BROKEN = re.compile(r'stoker_gateway_resumes_total\{[^}]*outcome="failed"[^}]*\} (\S+)')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("worker", metavar="WORKER", nargs="*", help="Only these workers, in this order. Default: all.")
    add_gateway_arguments(parser)
    parser.add_argument(
        "--restart",
        metavar="COMMAND",
        help="Shell command that restarts a worker and returns when the old process has ended, such as "
        "'ssh {host} systemctl restart stoker'. {worker}, {host}, {port} and {url} are replaced.",
    )
    parser.add_argument("--drain-s", type=float, default=600.0, metavar="SECONDS", help="Longest drain. Default: 600.")
    parser.add_argument("--ready-s", type=float, default=900.0, metavar="SECONDS", help="Longest start. Default: 900.")
    parser.add_argument(
        "--watch-s", type=float, default=30.0, metavar="SECONDS", help="How long each worker is watched. Default: 30."
    )
    parser.add_argument(
        "--max-errors", type=int, default=0, metavar="N", help="Stop if more requests fail. Default: 0."
    )


def run(args: argparse.Namespace) -> int:
    from stoker.proto.admin_api import ADMIN_FLEET_PATH, decode_worker_list
    from stoker.up.rolling import RollingUpgrade, UpgradeLimits, UpgradeStopped

    admin = GatewayAdmin.of(args)
    workers = decode_worker_list(admin.get(ADMIN_FLEET_PATH)).workers
    names = args.worker or [one.worker for one in workers]
    if not names:
        raise ConfigError(f"{admin.url} has no workers")
    restart = _CommandRestart(args.restart) if args.restart else _SupervisedRestart(admin.url)
    limits = UpgradeLimits(args.drain_s, args.ready_s, args.watch_s, args.max_errors)
    rolling = RollingUpgrade(_Control(admin), restart, limits, time.monotonic, time.sleep, _say)
    try:
        rolling.run(names)
    except UpgradeStopped as stopped:
        raise ConfigError(f"the upgrade has stopped: {stopped.message}") from stopped
    print_result(f"{len(names)} workers were restarted.")
    return 0


def _say(line: str) -> None:
    print_message(line, sys.stderr)


class _Control:
    """The gateway's admin API as a `FleetControl`."""

    def __init__(self, admin: GatewayAdmin) -> None:
        self._admin = admin

    def worker(self, name: str) -> WorkerStatus | None:
        return find_worker(self._admin, name)

    def drain(self, name: str) -> None:
        from stoker.proto.admin_api import ADMIN_DRAIN_PATH

        self._admin.post(f"{ADMIN_DRAIN_PATH}?worker={quote(name)}&move=1")

    def undrain(self, name: str) -> None:
        from stoker.proto.admin_api import ADMIN_UNDRAIN_PATH

        self._admin.post(f"{ADMIN_UNDRAIN_PATH}?worker={quote(name)}")

    def num_errors(self) -> int:
        page = self._admin.get("/metrics").decode()
        return int(sum(float(value) for pattern in (_FAILED, _BROKEN) for value in pattern.findall(page)))

    def num_failures(self, name: str) -> int:
        page = self._admin.get("/metrics").decode()
        pattern = r"stoker_gateway_worker_failures_total\{[^}]*worker=\"" + re.escape(name) + r"\"([^}]*)\} (\S+)"
        found = re.findall(pattern, page)
        return int(sum(float(value) for labels, value in found if 'kind="busy"' not in labels))


class _CommandRestart:
    """Restarts a worker with the operator's command."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __call__(self, status: WorkerStatus) -> None:
        host, _, port = status.worker.rpartition(":")
        values = {"worker": status.worker, "host": host.strip("[]"), "port": port, "url": status.url}
        command = self._command
        for name, value in values.items():
            command = command.replace("{" + name + "}", shlex.quote(value))
        code = subprocess.call(command, shell=True)
        if code:
            raise ConfigError(f"the command of --restart ended with {code}: {command}")


class _SupervisedRestart:
    """Ends a worker of `stoker up` on this machine, which starts it again."""

    def __init__(self, gateway_url: str) -> None:
        self._gateway_url = gateway_url

    def __call__(self, status: WorkerStatus) -> None:
        pid = self._pid(status)
        if pid is None:
            raise ConfigError("`stoker up` does not run it on this machine; give --restart COMMAND")
        os.kill(pid, signal.SIGTERM)
        until_s = time.monotonic() + _GONE_S
        while self._pid(status) == pid:
            if time.monotonic() >= until_s:
                raise ConfigError(f"process {pid} has not ended after {_GONE_S:g} s")
            time.sleep(_POLL_S)

    def _pid(self, status: WorkerStatus) -> int | None:
        from stoker.up.state import default_state_dir, living_fleets

        for fleet in living_fleets(default_state_dir(os.environ) / "fleets"):
            if fleet.gateway_url == self._gateway_url:
                return next(
                    (
                        part.pid
                        for part in fleet.parts
                        if part.kind == "worker" and part.address == status.url.rstrip("/")
                    ),
                    None,
                )
        return None
