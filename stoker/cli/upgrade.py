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
from collections import Counter, defaultdict
from typing import TYPE_CHECKING
from urllib.parse import quote

from stoker.base.errors import ConfigError, StokerError
from stoker.base.output import print_message, print_result
from stoker.cli.drain import find_worker
from stoker.cli.gateway_admin import GatewayAdmin, add_gateway_arguments
from stoker.cli.upgrade_hold import UpgradeHold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stoker.base.canary import RequestGroup
    from stoker.proto.admin_api import CanaryStatus, RequestOutcome, WorkerStatus

NAME = "upgrade"
HELP = "restart the workers of a fleet one at a time"
DESCRIPTION = """Restart the workers of a fleet one at a time, for example after the installation of a new version. Each one
is drained, its requests move to other workers, and it is restarted and watched before the next one. The upgrade stops with
exit code 1 at the first worker that does not get ready, whose requests fail, or that is much slower than the others. Workers
of `stoker up` on this machine are restarted by it. Others need --restart."""

EXIT_STOPPED = 1
_GONE_S = 120.0
_POLL_S = 0.1
_GATEWAY_RESTART_S = 60.0  # a gateway that does not answer for this time is gone
_MAX_REQUESTS = 1000  # as many as a gateway keeps
_FAILED = re.compile(r'stoker_gateway_requests_total\{([^}]*status="5\d\d"[^}]*)\} (\S+)')
_PROCESS = re.compile(r'process="(\d+)"')  # a label of each sample, if the gateway has several processes
_BROKEN = re.compile(r'stoker_gateway_resumes_total\{([^}]*outcome="failed"[^}]*)\} (\S+)')


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
    parser.add_argument(
        "--min-requests",
        type=int,
        default=50,
        metavar="N",
        help="Compare a worker with the others when both have had this many requests. Default: 50.",
    )
    parser.add_argument(
        "--slow-factor",
        type=float,
        default=3.0,
        metavar="X",
        help="Stop if the 90th percentile of a latency is this many times that of the other workers. Default: 3.",
    )


def run(args: argparse.Namespace) -> int:
    from stoker.base.canary import CanaryLimits
    from stoker.proto.admin_api import ADMIN_FLEET_PATH, decode_worker_list
    from stoker.up.rolling import RollingUpgrade, UpgradeLimits, UpgradeStopped

    canary = CanaryLimits(min_requests=args.min_requests, slow_factor=args.slow_factor)
    admin = GatewayAdmin.of(args)
    workers = decode_worker_list(admin.get(ADMIN_FLEET_PATH)).workers
    names = args.worker or [one.worker for one in workers]
    if not names:
        raise ConfigError(f"{admin.url} has no workers")
    restart = _CommandRestart(args.restart) if args.restart else _SupervisedRestart(admin.url)
    limits = UpgradeLimits(args.drain_s, args.ready_s, args.watch_s, args.max_errors, canary)
    with UpgradeHold(admin, _say) as hold:
        rolling = RollingUpgrade(
            _Control(admin.patient(_GATEWAY_RESTART_S), hold), restart, limits, time.monotonic, time.sleep, hold.say
        )
        try:
            rolling.run(names)
        except UpgradeStopped as stopped:
            hold.ended(f"stopped: {stopped.message}")
            print_message(f"stoker: the upgrade has stopped: {stopped.message}", sys.stderr)
            return EXIT_STOPPED
        except StokerError as error:
            hold.ended(f"stopped: {error.message}")
            if not rolling.has_begun:
                raise
            print_message(f"stoker: the upgrade has stopped, and a worker may be drained: {error.message}", sys.stderr)
            return EXIT_STOPPED
        outcome = f"{len(names)} workers were restarted" if len(names) > 1 else f"{names[0]} was restarted"
        hold.ended(outcome)
    print_result(f"{outcome}.")
    return 0


def _say(line: str) -> None:
    print_message(line, sys.stderr)


class _Control:
    """The gateway's admin API as a `FleetControl`."""

    def __init__(self, admin: GatewayAdmin, hold: UpgradeHold) -> None:
        self._admin = admin
        self._hold = hold
        self._errors, self._failures = _RestartedCounter(), defaultdict[str, _RestartedCounter](_RestartedCounter)

    def worker(self, name: str) -> WorkerStatus | None:
        return find_worker(self._admin, name)

    def drain(self, name: str) -> None:
        from stoker.proto.admin_api import ADMIN_DRAIN_PATH

        self._hold.check()
        self._admin.post(f"{ADMIN_DRAIN_PATH}?worker={quote(name)}&move=1")

    def undrain(self, name: str) -> None:
        from stoker.proto.admin_api import ADMIN_UNDRAIN_PATH

        self._admin.post(f"{ADMIN_UNDRAIN_PATH}?worker={quote(name)}")

    def num_errors(self) -> int:
        page = self._admin.get("/metrics").decode()
        return self._errors.saw([found for pattern in (_FAILED, _BROKEN) for found in pattern.findall(page)])

    def num_failures(self, name: str) -> int:
        page = self._admin.get("/metrics").decode()
        pattern = r"stoker_gateway_worker_failures_total\{([^}]*worker=\"" + re.escape(name) + r"\"[^}]*)\} (\S+)"
        found = re.findall(pattern, page)
        return self._failures[name].saw([one for one in found if 'kind="busy"' not in one[0]])

    def newest_s(self) -> float:
        return max((one.time_s for one in self._ended()), default=0.0)

    def groups(self, name: str, after_s: float) -> tuple[RequestGroup, RequestGroup]:
        from stoker.proto.admin_api import ADMIN_FLEET_PATH, decode_worker_list

        roles = {one.worker: one.role for one in decode_worker_list(self._admin.get(ADMIN_FLEET_PATH)).workers}
        others = {other for other, role in roles.items() if other != name and role == roles.get(name)}
        is_prefill = roles.get(name) == "prefill"  # the time between tokens is that of the decode worker
        own: list[RequestOutcome] = []
        rest: list[RequestOutcome] = []
        for one in self._ended():
            worker = one.prefill_worker if is_prefill else one.worker
            if one.time_s > after_s and (worker == name or worker in others):
                (own if worker == name else rest).append(one)
        return _group(own, has_itl=not is_prefill), _group(rest, has_itl=not is_prefill)

    def canaries(self) -> Sequence[CanaryStatus]:
        from stoker.proto.admin_api import ADMIN_CANARIES_PATH, decode_canary_list

        return [one for page in self._pages(ADMIN_CANARIES_PATH) for one in decode_canary_list(page).canaries]

    def _ended(self) -> list[RequestOutcome]:
        from stoker.proto.admin_api import ADMIN_REQUESTS_PATH, decode_request_outcomes

        pages = self._pages(f"{ADMIN_REQUESTS_PATH}?n={_MAX_REQUESTS}")
        return [one for page in pages for one in decode_request_outcomes(page).requests]

    def _pages(self, path: str) -> Iterator[bytes]:
        """Yield the answers of all processes of the gateway."""
        from stoker.proto.admin_api import ADMIN_STATUS_PATH, decode_gateway_status

        joint = "&" if "?" in path else "?"
        for number in range(decode_gateway_status(self._admin.get(ADMIN_STATUS_PATH)).processes):
            yield self._admin.get(f"{path}{joint}process={number}")


def _group(requests: Sequence[RequestOutcome], has_itl: bool) -> RequestGroup:
    from stoker.base.canary import RequestGroup

    good = [one for one in requests if one.status < 500 and one.ttft_ms is not None]
    itl_ms = [
        (one.e2e_ms - one.ttft_ms) / (one.completion_tokens - 1)
        for one in good
        if has_itl and one.ttft_ms is not None and one.completion_tokens > 1 and one.e2e_ms > one.ttft_ms
    ]
    return RequestGroup(
        len(requests),
        sum(one.status >= 500 for one in requests),
        [one.ttft_ms for one in good if one.ttft_ms is not None],
        itl_ms,
    )


class _RestartedCounter:
    """A count that goes on when a process of the gateway, which counts, is restarted and begins with 0 again."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()  # what processes had counted when they ended
        self._last: Counter[str] = Counter()

    def saw(self, samples: Iterable[tuple[str, str]]) -> int:
        """Take the labels and values of samples. Return the count of all processes since the first one started."""
        counts: Counter[str] = Counter()
        for labels, value in samples:
            found = _PROCESS.search(labels)
            counts[found[1] if found else ""] += int(float(value))
        for process, count in counts.items():  # one that does not answer now has no samples
            if count < self._last[process]:
                self._before[process] += self._last[process]
            self._last[process] = count
        return self._before.total() + self._last.total()


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
            if fleet.has_gateway(self._gateway_url):
                return next(
                    (
                        part.pid
                        for part in fleet.parts
                        if part.kind == "worker" and part.address == status.url.rstrip("/")
                    ),
                    None,
                )
        return None
