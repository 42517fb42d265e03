"""Where a helper's process begins, which tries grammars for an engine (grammar_trials.py): each in a fork, within limits.

It ends when nobody has needed it for a while, or when the engine has gone.

    python -m stoker.worker.grammar_helper FOLDER VOCAB_SIZE LIMITS      a GrammarSpec in JSON a line in, a Verdict a line out
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.sched.request import GrammarSpec
from stoker.text.tokenizer import Tokenizer
from stoker.worker.grammar import XGrammars
from stoker.worker.grammar_trials import Limits, Verdict

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
    asked = select.poll()
    asked.register(0, select.POLLIN)
    questions = os.fdopen(0, "rb")
    while asked.poll(_IDLE_MS) and (line := questions.readline()):
        verdict = _tried(grammars.prepare, msgspec.json.decode(line, type=GrammarSpec), limits)
        os.write(answers, msgspec.json.encode(verdict) + b"\n")


def _tried(compile_it: Callable[[GrammarSpec], object], spec: GrammarSpec, limits: Limits) -> Verdict:
    """In a process of its own, which ends with the trial."""
    found, tells = os.pipe()
    if not (trial := os.fork()):
        _keep_to(limits)
        os.write(tells, msgspec.json.encode(_compiled(compile_it, spec, limits)))
        os._exit(0)
    os.close(tells)
    with os.fdopen(found, "rb") as told:
        events = select.poll()
        events.register(told, select.POLLIN)
        events.register(0, select.POLLIN)  # nobody asks anything meanwhile: then the engine has gone
        if any(fd == 0 for fd, _ in events.poll()):
            os.kill(trial, signal.SIGKILL)
            os._exit(0)
        words = told.read()
    _, status = os.waitpid(trial, 0)
    if words:
        return msgspec.json.decode(words, type=Verdict)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM):
        return Verdict(f"not a usable {spec.kind}: it takes longer than {limits.cpu_s} s to compile; {_ADVICE}")
    return Verdict(_too_large(spec, limits))


def _keep_to(limits: Limits) -> None:
    most_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + limits.num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(limits.wall_s)


def _compiled(compile_it: Callable[[GrammarSpec], object], spec: GrammarSpec, limits: Limits) -> Verdict:
    try:
        compile_it(spec)
    except InvalidRequest as error:
        return Verdict(_too_large(spec, limits) if "bad_alloc" in error.message else error.message)
    except MemoryError:
        return Verdict(_too_large(spec, limits))
    except Exception as error:
        return Verdict(f"no grammar could be made: {error}")
    return Verdict("")


def _too_large(spec: GrammarSpec, limits: Limits) -> str:
    return f"not a usable {spec.kind}: it takes more than {limits.num_bytes >> 20} MiB to compile; {_ADVICE}"


if __name__ == "__main__":
    main()
