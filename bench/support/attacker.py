"""Runs one attack against a port, at a limited rate, and prints what it did as JSON. Standard library only.

    python -m bench.support.attacker PORT ATTACK SECONDS [--rate-mb 8] [--key KEY] [--seed 0]

One thread, non-blocking sockets and buffers made beforehand, so that the attacker takes little CPU time of the machine
that it shares with the gateway. Its connections come from 127.0.1.1 and the addresses after it, because gateways may
limit connections per address and the tenant under test comes from 127.0.0.1.
"""

from __future__ import annotations

import argparse
import errno
import heapq
import json
import random
import resource
import select
import socket
import struct
import time
from collections import Counter, deque

from bench.support.attack_corpus import ATTACKS, Attack, Script

_TICK_S = 0.005
_BURST_S = 0.02  # unused rate is kept for this long
_BIND_ADDRESS_NO_PORT = 24  # IP_BIND_ADDRESS_NO_PORT: choose the port at connect, so that all of them can be used
_RESET = struct.pack("ii", 1, 0)
_SMALL_BUFFER = 4096


class _Attacking:
    """One connection of the attack."""

    __slots__ = ("left", "script", "wire")

    def __init__(self, wire: socket.socket, script: Script) -> None:
        self.wire, self.script = wire, script
        self.left = memoryview(b"")


class Attacker:
    def __init__(self, attack: Attack, port: int, key: str, bytes_per_s: float, seed: int) -> None:
        self._attack, self._port, self._key = attack, port, key
        self._bytes_per_s = min(bytes_per_s, attack.bytes_per_s or bytes_per_s)
        self._rng = random.Random(seed)
        self._poll = select.epoll()
        self._open: dict[int, _Attacking] = {}
        self._sendable: deque[_Attacking] = deque()
        self._paused: list[tuple[float, int, _Attacking]] = []
        self._scratch = bytearray(256 << 10)
        self.counts: Counter[str] = Counter()

    def run(self, seconds: float) -> dict[str, float]:
        begin_s = last_s = time.monotonic()
        allowance, connects = 0.0, 1.0
        while (now_s := time.monotonic()) < begin_s + seconds:
            passed_s, last_s = now_s - last_s, now_s
            allowance = min(allowance + passed_s * self._bytes_per_s, _BURST_S * self._bytes_per_s)
            connects = min(connects + passed_s * self._attack.connects_per_s, 1 + 0.05 * self._attack.connects_per_s)
            while connects >= 1 and len(self._open) < self._attack.connections and self._connect():
                connects -= 1
            while self._paused and self._paused[0][0] <= now_s:
                self._next_piece(heapq.heappop(self._paused)[2], now_s)
            allowance = self._send(allowance, now_s)
            self._receive(_TICK_S)
        elapsed_s = time.monotonic() - begin_s
        mb_per_s = self.counts["bytes sent"] / elapsed_s / 1e6
        return {"mb_per_s": round(mb_per_s, 3), "open_at_end": len(self._open), **self.counts}

    def _connect(self) -> bool:
        wire = socket.socket()
        wire.setblocking(False)
        if not self._attack.reads:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        if self._attack.resets:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        wire.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
        wire.bind((f"127.0.1.{1 + self.counts['connections'] % self._attack.addresses}", 0))
        if (code := wire.connect_ex(("127.0.0.1", self._port))) not in (0, errno.EINPROGRESS):
            self.counts[f"connect: {errno.errorcode[code]}"] += 1
            wire.close()
            return False
        self.counts["connections"] += 1
        connection = _Attacking(wire, self._attack.script(self._rng, self._key))
        self._open[wire.fileno()] = connection
        self._poll.register(wire, self._events(writes=True))
        return True

    def _events(self, writes: bool) -> int:
        reads = select.EPOLLIN if self._attack.reads else 0
        return reads | select.EPOLLRDHUP | (select.EPOLLOUT if writes else 0)

    def _next_piece(self, connection: _Attacking, now_s: float) -> None:
        if connection.wire.fileno() < 0:
            return
        piece = next(connection.script, None)
        if piece is None:
            self._drop(connection)
        elif isinstance(piece, float):
            heapq.heappush(self._paused, (now_s + piece, id(connection), connection))
        else:
            connection.left = memoryview(piece)
            self._sendable.append(connection)

    def _send(self, allowance: float, now_s: float) -> float:
        """Send pieces in turn while the rate allows it; return what is left of it."""
        while allowance >= 1 and self._sendable:
            connection = self._sendable.popleft()
            if connection.wire.fileno() < 0:
                continue
            try:
                sent = connection.wire.send(connection.left[: int(allowance)])
            except BlockingIOError:
                self._poll.modify(connection.wire, self._events(writes=True))
                continue
            except OSError:
                self._drop(connection)
                continue
            allowance -= sent
            self.counts["bytes sent"] += sent
            connection.left = connection.left[sent:]
            if connection.left:
                self._sendable.append(connection)
            else:
                self._next_piece(connection, now_s)
        return allowance

    def _receive(self, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            for number, events in self._poll.poll(left_s):
                if connection := self._open.get(number):
                    self._handle(connection, events)

    def _handle(self, connection: _Attacking, events: int) -> None:
        if events & select.EPOLLIN:
            try:
                size = connection.wire.recv_into(self._scratch)
            except OSError:
                size = 0
            if not size:
                self._drop(connection, "closed by the gateway")
                return
            self.counts["bytes received"] += size
            if self._scratch[:5] == b"HTTP/":
                self.counts[f"status {self._scratch[9:12].decode(errors='replace')}"] += 1
        if events & (select.EPOLLHUP | select.EPOLLERR) or (events & select.EPOLLRDHUP and not self._attack.reads):
            self._drop(connection, "closed by the gateway")
        elif events & select.EPOLLOUT:
            self._poll.modify(connection.wire, self._events(writes=False))
            if connection.left:
                self._sendable.append(connection)
            else:
                self._next_piece(connection, time.monotonic())

    def _drop(self, connection: _Attacking, reason: str = "") -> None:
        if reason:
            self.counts[reason] += 1
        self._open.pop(connection.wire.fileno(), None)
        connection.wire.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("attack", choices=ATTACKS, metavar="ATTACK")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--rate-mb", type=float, default=8.0, help="MB/s of all connections (default: %(default)s)")
    parser.add_argument("--key", default="", help="API key of the attacking tenant (default: none)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attacker = Attacker(ATTACKS[args.attack], args.port, args.key, args.rate_mb * 1e6, args.seed)
    print(json.dumps(attacker.run(args.seconds)))


if __name__ == "__main__":
    main()
