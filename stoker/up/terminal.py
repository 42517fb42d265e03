"""What `stoker up` prints: progress while it starts, the table of running processes, and restarts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import IO

from stoker.base.output import print_message
from stoker.up.plan import FleetPlan

_QUESTION = "What is the capital of France?"


class Terminal:
    """Writes progress to `err`, and the table of processes to `out`."""

    def __init__(self, out: IO[str] | None = None, err: IO[str] | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._started_s = time.monotonic()
        self._stage = ""
        self._unfinished = False  # the last line is a progress line, which the next one overwrites

    def say(self, text: str) -> None:
        start = "\r\033[K" if self._unfinished else ""
        self._unfinished = False
        print_message(f"{start}{time.monotonic() - self._started_s:6.1f} s  {text}", self._err)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show progress: on a terminal in one line that is overwritten, elsewhere as one line per stage."""
        if self._err.isatty() and total:
            part = f"{stage} {100 * done // total}%"
            print_message(f"\r\033[K{time.monotonic() - self._started_s:6.1f} s  {part}", self._err, end="")
            self._unfinished = True
            if done >= total:
                print_message("", self._err)
                self._unfinished = False
        elif stage != self._stage:
            self.say(stage)
        self._stage = stage

    def welcome(
        self, plan: FleetPlan, gateway_url: str, token_file: str, rows: Sequence[Sequence[str]], log_dir: str
    ) -> None:
        key = " -H 'Authorization: Bearer KEY'" if plan.needs_api_key else ""
        insecure = " -k" if plan.gateway.tls else ""
        body = {"model": plan.models[0] if plan.models else "MODEL", "temperature": 0}
        body |= {"messages": [{"role": "user", "content": _QUESTION}]}
        print_message(
            f"""
{table(("PROCESS", "ROLE", "ADDRESS", "PID", "LOG"), rows)}

Logs are in {log_dir}. `stoker status` shows health and load. Ctrl-C stops everything.
The dashboard is at {gateway_url}/ui, and its token in {token_file}. Try:

curl -s{insecure} {gateway_url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
  -d '{json.dumps(body)}'
""",
            self._out,
        )


def printable(text: str) -> str:
    """Return text that cannot control the terminal: names come from workers, which may be at fault."""
    return "".join(char if char.isprintable() else "?" for char in text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns as text."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
