"""Starts the process of a rank, for rank 0 and for the supervisor of another node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stoker.base.orphans import die_with
from stoker.parallel.channel import PlainChannel
from stoker.parallel.rank_link import Kind, LinkEnd, RankLink

COMMAND = (sys.executable, "-m", "stoker.engine.ranks.rank_process")


@dataclass(frozen=True, slots=True)
class SpawnedRank:
    """A rank's process, and the link to it."""

    process: subprocess.Popen[bytes]
    link: RankLink

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()

    def exit_code(self, timeout_s: float) -> int | None:
        """Return the exit code of a rank whose link has ended. A process that is ending may take a moment."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


def spawn_rank(
    command: Sequence[str],
    arguments: dict[str, Any],
    fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> SpawnedRank:
    """Start a rank, which inherits `fds` and, by default, the environment. It is killed when the calling thread ends.

    The arguments are not on the command line, which every user of the machine can read: they contain a key.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=(theirs.fileno(), *fds),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()) if sys.platform == "linux" else None,
        )
    link = RankLink(PlainChannel(ours))
    with suppress(LinkEnd):  # it has already ended, as the reader of the link will find
        link.send_json(Kind.ARGUMENTS, arguments)
    return SpawnedRank(process, link)
