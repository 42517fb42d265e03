"""Grammars that may take any time to compile are tried first, by a process that can be stopped.

A thread that compiles cannot be stopped, and a short expression, or a schema of many long strings, may keep it for minutes or take
all memory. So what is not plainly tame is compiled beforehand in a fork of a helper, within limits. What gets through is compiled
once more by those who use it, which takes as long again and no longer. The helper (grammar_helper.py) is started when it is first
needed, which takes some seconds: it has to read the vocabulary.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.sched.request import GrammarSpec

_MAX_REFUSED = 1024

# What is compiled without a trial: it takes two seconds at most, or ten if it lists 10,000 values. A count in braces, or a length
# in a schema, is about a millisecond at worst.
_TAME_REGEX_CHARS, _TAME_SCHEMA_CHARS = 1024, 256 << 10
_TAME_COUNTS = 2048
_IN_BRACES, _NUMBER = re.compile(r"\{[^{}]*\}"), re.compile(r"\d+")
_QUANTIFIED_GROUP = re.compile(r"\)\s*[*+?{]")
_SCHEMA_COUNT = re.compile(r'"(?:min|max)(?:Length|Items|Properties)"\s*:\s*(\d[\d.e+]*)')
_FREE_HANDS = re.compile(r'"(pattern|grammar)')  # also in a structural tag


def is_tame(spec: GrammarSpec) -> bool:
    """Whether it can be foreseen that compiling takes no more than a moment."""
    if spec.kind == "json_object":
        return True
    if spec.kind == "ebnf":
        return False
    if spec.kind == "regex":
        if len(spec.text) > _TAME_REGEX_CHARS or _QUANTIFIED_GROUP.search(spec.text):
            return False
        counts = _NUMBER.findall(" ".join(_IN_BRACES.findall(spec.text)))
    else:
        if len(spec.text) > _TAME_SCHEMA_CHARS or _FREE_HANDS.search(spec.text):
            return False
        counts = _SCHEMA_COUNT.findall(spec.text)
    return sum(map(float, counts)) <= _TAME_COUNTS  # as float: no number has too many digits for it


class Limits(msgspec.Struct, frozen=True):
    """Of one trial."""

    cpu_s: int = 40  # 20,000 listed values take 30
    wall_s: int = 240  # on a busy machine; a compiler that waits for something waits for ever
    num_bytes: int = 1 << 30  # more than the helper itself has


class Question(msgspec.Struct, frozen=True):
    number: int
    spec: GrammarSpec


class Verdict(msgspec.Struct, frozen=True):
    number: int  # the question's
    refused: str  # why; empty: it can be compiled
    lasts: bool = True  # False: it was the machine's fault, and may go better another time


class _HelperGone(Exception):
    """Before it gave its verdict."""


class _Helper:
    """A helper's process, and who waits for its verdicts."""

    def __init__(self, command: list[str]) -> None:
        # It computes nothing on a card, and its share of one would be taken from others.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Verdict]] = {}
        self._num_asked = 0
        self.is_gone = False
        threading.Thread(target=self._read, name="grammar-trials", daemon=True).start()

    def ask(self, spec: GrammarSpec) -> Verdict:
        answer: Future[Verdict] = Future()
        with self._lock:
            if self.is_gone:
                raise _HelperGone
            self._num_asked += 1
            self._waiting[self._num_asked] = answer
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):  # then its end is read, too
                self.process.stdin.write(msgspec.json.encode(Question(self._num_asked, spec)) + b"\n")
                self.process.stdin.flush()
        return answer.result()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                verdict = msgspec.json.decode(line, type=Verdict)
                with self._lock:
                    answer = self._waiting.pop(verdict.number)
                answer.set_result(verdict)
        with self._lock:
            self.is_gone = True
            left = list(self._waiting.values())
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        for answer in left:
            answer.set_exception(_HelperGone())
        self.process.wait()


class GrammarTrials:
    """For any thread: as many trials at a time as are asked for."""

    def __init__(self, folder: Path, vocab_size: int, limits: Limits | None = None) -> None:
        told = (str(folder), str(vocab_size), msgspec.json.encode(limits or Limits()).decode())
        self._command = [sys.executable, "-m", "stoker.engine.process.grammars.trial_helper", *told]
        self._lock = threading.Lock()
        self._helper: _Helper | None = None
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    @property
    def pid(self) -> int | None:
        """The helper's, while there is one."""
        return None if self._helper is None or self._helper.is_gone else self._helper.process.pid

    def check(self, spec: GrammarSpec) -> None:
        """InvalidRequest if it cannot be compiled, or not within the limits."""
        name = hashlib.sha256(f"{spec.kind}\0{spec.text}".encode()).digest()
        reason = self._refused.get(name)
        if reason is None:
            verdict = self._try(spec)
            reason = verdict.refused
            if reason and verdict.lasts:
                with self._lock:
                    self._refused[name] = reason
                    if len(self._refused) > _MAX_REFUSED:
                        self._refused.popitem(last=False)
        if reason:
            raise InvalidRequest(reason, code="invalid_grammar")

    def _try(self, spec: GrammarSpec) -> Verdict:
        for _ in range(2):  # one that had nothing to do may be leaving just now
            with self._lock:
                if self._helper is None or self._helper.is_gone:
                    self._helper = _Helper(self._command)
                helper = self._helper
            with suppress(_HelperGone):
                return helper.ask(spec)
        raise RuntimeError("the process that tries grammars ended")

    def close(self) -> None:
        with self._lock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.process.kill()
            helper.process.wait()
