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


class Verdict(msgspec.Struct, frozen=True):
    refused: str  # why; empty: it can be compiled


class GrammarTrials:
    """For any thread. One trial at a time: the next may have to wait as long as one can take."""

    def __init__(self, folder: Path, vocab_size: int, limits: Limits | None = None) -> None:
        told = (str(folder), str(vocab_size), msgspec.json.encode(limits or Limits()).decode())
        self._command = [sys.executable, "-m", "stoker.worker.grammar_helper", *told]
        self._helper: subprocess.Popen[bytes] | None = None
        self._trying = threading.Lock()
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def check(self, spec: GrammarSpec) -> None:
        """InvalidRequest if it cannot be compiled, or not within the limits."""
        name = hashlib.sha256(f"{spec.kind}\0{spec.text}".encode()).digest()
        with self._trying:
            reason = self._refused.get(name)
            if reason is None:
                reason = self._try(spec)
                if reason:
                    self._refused[name] = reason
                    if len(self._refused) > _MAX_REFUSED:
                        self._refused.popitem(last=False)
        if reason:
            raise InvalidRequest(reason, code="invalid_grammar")

    def _try(self, spec: GrammarSpec) -> str:
        for _ in range(2):  # one that had nothing to do may be leaving just now
            helper = self._started()
            assert helper.stdin is not None
            assert helper.stdout is not None
            line = b""
            with suppress(BrokenPipeError):
                helper.stdin.write(msgspec.json.encode(spec) + b"\n")
                helper.stdin.flush()
                line = helper.stdout.readline()
            if line:
                return msgspec.json.decode(line, type=Verdict).refused
            self.close()
        raise RuntimeError("the process that tries grammars ended")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._helper is None:
            # It computes nothing on a card, and its share of one would be taken from others.
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
            self._helper = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
        return self._helper

    def close(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.kill()
            helper.communicate()
