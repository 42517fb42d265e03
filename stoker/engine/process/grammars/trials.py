"""GrammarTrials: compiles grammars of unknown cost in a helper process first, within time and memory limits.

A thread that compiles cannot be stopped, and a short regex, or a schema of many long strings, may occupy it for minutes or
use up all memory. So a grammar that is not certainly cheap (compile_cost.py) is first compiled in a fork of a helper process.
A grammar that took long in its trial is sent back compiled. One that was compiled quickly is compiled again in the engine process,
because sending it would take longer. The helper (trial_helper.py) is started when it is first needed. That takes some seconds,
because it has to read the vocabulary.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.engine.process.grammars.rejections import Rejections
from stoker.sched.request import GrammarSpec


class TrialLimits(msgspec.Struct, frozen=True):
    """The limits of one trial."""

    cpu_s: int = 40  # 20,000 enum values take 30 s
    wall_s: int = 240  # for a busy machine, and for a compiler that blocks forever
    num_bytes: int = 1 << 30  # on top of what the helper itself uses
    worth_sending_s: float = 1.0  # CPU seconds; a grammar that was compiled faster is compiled again
    sent_bytes_per_s: float = 8e6  # writing and reading a serialized grammar together


class TrialRequest(msgspec.Struct, frozen=True):
    """Sent to the helper."""

    number: int
    spec: GrammarSpec


class SentGrammar(msgspec.Struct, frozen=True):
    """A grammar that was compiled in its trial. The fields are those of PreparedGrammar."""

    serialized: bytes
    first_ending: int | None
    reserve: int


class TrialResult(msgspec.Struct, frozen=True):
    """Returned by the helper."""

    number: int  # of the TrialRequest
    rejection: str  # the reason; empty if the grammar can be compiled
    is_final: bool = True  # False: the machine was short of resources, and another trial may pass
    grammar: SentGrammar | None = None  # None: the engine process compiles it


class _HelperEnded(Exception):
    """The helper ended before it returned a result."""


class _TrialHelper:
    """A running helper process and the threads that wait for its results."""

    def __init__(self, command: list[str]) -> None:
        # The helper needs no GPU, and a CUDA context would take GPU memory.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[TrialResult]] = {}
        self._num_requests = 0
        self.has_ended = False
        threading.Thread(target=self._read, name="grammar-trials", daemon=True).start()

    def run(self, spec: GrammarSpec) -> TrialResult:
        """Run one trial. Raises _HelperEnded."""
        result: Future[TrialResult] = Future()
        with self._lock:
            if self.has_ended:
                raise _HelperEnded
            self._num_requests += 1
            self._waiting[self._num_requests] = result
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):  # _read() then finds the end of the output, too
                self.process.stdin.write(msgspec.json.encode(TrialRequest(self._num_requests, spec)) + b"\n")
                self.process.stdin.flush()
        return result.result()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                result = msgspec.json.decode(line, type=TrialResult)
                with self._lock:
                    future = self._waiting.pop(result.number)
                future.set_result(result)
        with self._lock:
            self.has_ended = True
            unanswered = list(self._waiting.values())
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        for future in unanswered:
            future.set_exception(_HelperEnded())
        self.process.wait()


class GrammarTrials:
    """Can be used from any thread. Trials of several threads run in parallel."""

    def __init__(self, folder: Path, vocab_size: int, limits: TrialLimits | None = None) -> None:
        arguments = (str(folder), str(vocab_size), msgspec.json.encode(limits or TrialLimits()).decode())
        self._command = [sys.executable, "-m", "stoker.engine.process.grammars.trial_helper", *arguments]
        self._lock = threading.Lock()
        self._helper: _TrialHelper | None = None
        self._rejections = Rejections()

    @property
    def pid(self) -> int | None:
        """The helper's process id, if it is running."""
        return None if self._helper is None or self._helper.has_ended else self._helper.process.pid

    def check(self, spec: GrammarSpec) -> SentGrammar | None:
        """Raise InvalidRequest if the grammar cannot be compiled within the limits. Return it if it took long to compile."""
        self._rejections.check(spec)
        result = self._run(spec)
        if result.rejection:
            if result.is_final:
                self._rejections.add(spec, result.rejection)
            raise InvalidRequest(result.rejection, code="invalid_grammar")
        return result.grammar

    def _run(self, spec: GrammarSpec) -> TrialResult:
        for _ in range(2):  # an idle helper may end at this very moment
            with self._lock:
                if self._helper is None or self._helper.has_ended:
                    self._helper = _TrialHelper(self._command)
                helper = self._helper
            with suppress(_HelperEnded):
                return helper.run(spec)
        raise RuntimeError("the helper process for grammar trials ended twice without a result")

    def close(self) -> None:
        with self._lock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.process.kill()
            helper.process.wait()
