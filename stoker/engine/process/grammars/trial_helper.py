"""The entry point of the helper process that tries slow grammars (trials.py): each in a fork, within limits.

The helper ends when it has been idle for a while, or when the engine process is gone.

    python -m stoker.engine.process.grammars.trial_helper FOLDER VOCAB_SIZE LIMITS

It reads one Question per line of standard input and writes one Verdict per line of standard output, both as JSON.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.base.orphans import die_with
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.engine.process.grammars.trials import Limits, Question, Verdict
from stoker.sched.request import GrammarSpec
from stoker.text.tokenizer import Tokenizer

_IDLE_MS = 300_000
_ADVICE = "fewer or smaller counts, lengths and nested repetitions would help"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the server decides when its engine ends
    os.nice(10)
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    grammars = XGrammars(Tokenizer.from_folder(Path(sys.argv[1])), int(sys.argv[2]))
    limits = msgspec.json.decode(sys.argv[3], type=Limits)
    grammars.warm_up()
    events, rest = select.poll(), b""
    events.register(0, select.POLLIN)
    trials: dict[int, Trial] = {}
    while ready := events.poll(None if trials else _IDLE_MS):
        for fd, _ in ready:
            if fd in trials:
                events.unregister(fd)
                os.write(answers, msgspec.json.encode(trials.pop(fd).verdict()) + b"\n")
                continue
            if not (data := os.read(0, 1 << 20)):
                for trial in trials.values():
                    os.kill(trial.pid, signal.SIGKILL)
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                trial = begin(grammars.prepare, msgspec.json.decode(line, type=Question), limits)
                trials[trial.told] = trial
                events.register(trial.told, select.POLLIN)


@dataclass(frozen=True, slots=True)
class Trial:
    """A process of its own, which ends with it."""

    question: Question
    limits: Limits
    pid: int
    told: int  # where it says what it found

    def verdict(self) -> Verdict:
        """When there is something to read, or it has ended."""
        with os.fdopen(self.told, "rb") as told:
            words = told.read()
        _, status = os.waitpid(self.pid, 0)
        if words:
            return Verdict(self.question.number, words.decode()[1:])
        signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if signal_number in (signal.SIGALRM, signal.SIGKILL):  # starved, or the first to go when memory ran out
            return Verdict(self.question.number, _not_now(self.question.spec), lasts=False)
        why = _too_slow if signal_number == signal.SIGXCPU else _too_large
        return Verdict(self.question.number, why(self.question.spec, self.limits))


def begin(compile_it: Callable[[GrammarSpec], object], question: Question, limits: Limits) -> Trial:
    told, tells = os.pipe()
    die_with_helper = die_with(os.getpid())
    pid = os.fork()
    if not pid:
        try:
            die_with_helper()
            _keep_to(limits)
            os.write(tells, b"." + _why_not(compile_it, question.spec, limits).encode())
        finally:
            os._exit(0)  # whatever happened: there is one helper
    os.close(tells)
    return Trial(question, limits, pid, told)


def _keep_to(limits: Limits) -> None:
    most_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + limits.num_bytes
    for kind, most in (
        (resource.RLIMIT_AS, most_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, rather a trial than an engine
    signal.alarm(limits.wall_s)


def _why_not(compile_it: Callable[[GrammarSpec], object], spec: GrammarSpec, limits: Limits) -> str:
    """Empty: it can be compiled."""
    try:
        compile_it(spec)
    except InvalidRequest as error:
        return _too_large(spec, limits) if "bad_alloc" in error.message else error.message
    except MemoryError:
        return _too_large(spec, limits)
    except Exception as error:
        return f"no grammar could be made: {error}"
    return ""


def _not_now(spec: GrammarSpec) -> str:
    return f"this {spec.kind} could not be compiled while the machine is short of memory or processors; try again, or a simpler one"


def _too_slow(spec: GrammarSpec, limits: Limits) -> str:
    return f"not a usable {spec.kind}: it takes longer than {limits.cpu_s} s to compile; {_ADVICE}"


def _too_large(spec: GrammarSpec, limits: Limits) -> str:
    return f"not a usable {spec.kind}: it takes more than {limits.num_bytes >> 20} MiB to compile; {_ADVICE}"


if __name__ == "__main__":
    main()
