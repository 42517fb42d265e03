"""The entry point of the helper process for grammar trials (trials.py). Each trial runs in a fork, within limits.

The helper ends after it has been idle for a while, or when the engine process ends.

    python -m stoker.engine.process.grammars.trial_helper FOLDER VOCAB_SIZE LIMITS

It reads one TrialRequest per line of standard input and writes one TrialResult per line of standard output, both as JSON.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.base.orphans import die_with
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.engine.process.grammars.matcher import PreparedGrammar
from stoker.engine.process.grammars.trials import SentGrammar, TrialLimits, TrialRequest, TrialResult
from stoker.sched.request import GrammarSpec
from stoker.text.tokenizer import Tokenizer

_IDLE_MS = 300_000
_MAX_SENT_BYTES = 64 << 20
_SENDING_CPU_S = 20
_ADVICE = "use fewer or smaller counts, lengths and nested repetitions"


def main() -> None:
    # These signals may reach all processes of a service. The server decides when the engine and its helpers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(10)
    results = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not mix with the results
    grammars = XGrammars(Tokenizer.from_folder(Path(sys.argv[1])), int(sys.argv[2]))
    limits = msgspec.json.decode(sys.argv[3], type=TrialLimits)
    grammars.warm_up()
    events, rest = select.poll(), b""
    events.register(0, select.POLLIN)
    trials: dict[int, Trial] = {}
    while ready := events.poll(None if trials else _IDLE_MS):
        for fd, _ in ready:
            if fd in trials:
                events.unregister(fd)
                _write_all(results, msgspec.json.encode(trials.pop(fd).result()) + b"\n")
                continue
            if not (data := os.read(0, 1 << 20)):
                for trial in trials.values():
                    os.kill(trial.pid, signal.SIGKILL)
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                request = msgspec.json.decode(line, type=TrialRequest)
                for one in request.spec.inputs:
                    grammars.input_vocabulary(one)  # once, not in every fork
                trial = start(grammars.prepare, request, limits)
                trials[trial.output] = trial
                events.register(trial.output, select.POLLIN)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class _Outcome(msgspec.Struct, frozen=True):
    """What a trial writes before it ends."""

    rejection: str  # empty: the grammar can be compiled
    grammar: SentGrammar | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A running trial, in a process of its own."""

    request: TrialRequest
    limits: TrialLimits
    pid: int
    output: int  # the read end of the pipe to which the trial writes its _Outcome

    def result(self) -> TrialResult:
        """Return the result. Call it when the output is readable or closed."""
        with os.fdopen(self.output, "rb") as output:
            written = output.read()
        _, status = os.waitpid(self.pid, 0)
        if written:
            outcome = msgspec.msgpack.decode(written, type=_Outcome)
            return TrialResult(self.request.number, outcome.rejection, grammar=outcome.grammar)
        signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if signal_number in (signal.SIGALRM, signal.SIGKILL):  # no CPU time for too long, or killed for lack of memory
            return TrialResult(self.request.number, _short_of_resources(self.request.spec), is_final=False)
        rejection = _too_slow if signal_number == signal.SIGXCPU else _too_large
        return TrialResult(self.request.number, rejection(self.request.spec, self.limits))


def start(
    compile_grammar: Callable[[GrammarSpec], PreparedGrammar], request: TrialRequest, limits: TrialLimits
) -> Trial:
    """Fork a process that compiles the grammar within the limits."""
    read_end, write_end = os.pipe()
    die_with_helper = die_with(os.getpid())
    pid = os.fork()
    if not pid:
        try:
            die_with_helper()
            _set_limits(limits)
            with os.fdopen(write_end, "wb") as output:
                output.write(msgspec.msgpack.encode(_outcome(compile_grammar, request.spec, limits)))
        finally:
            os._exit(0)  # the fork must never return into the helper's loop
    os.close(write_end)
    return Trial(request, limits, pid, read_end)


def _set_limits(limits: TrialLimits) -> None:
    max_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + limits.num_bytes
    for kind, limit in (
        (resource.RLIMIT_AS, max_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the kernel kills a trial before an engine
    signal.alarm(limits.wall_s)


def _outcome(
    compile_grammar: Callable[[GrammarSpec], PreparedGrammar], spec: GrammarSpec, limits: TrialLimits
) -> _Outcome:
    """Compile the grammar."""
    try:
        started_s = time.process_time()
        prepared = compile_grammar(spec)
        return _Outcome("", _sent(prepared, time.process_time() - started_s, limits))
    except InvalidRequest as error:
        return _Outcome(_too_large(spec, limits) if "bad_alloc" in error.message else error.message)
    except MemoryError:
        return _Outcome(_too_large(spec, limits))
    except Exception as error:
        return _Outcome(f"the grammar cannot be compiled: {error}")


def _sent(prepared: PreparedGrammar, compile_s: float, limits: TrialLimits) -> SentGrammar | None:
    """Return the grammar for the engine process if sending it is faster than compiling it again."""
    if compile_s < limits.worth_sending_s:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (hard if soft == hard else soft + _SENDING_CPU_S, hard))
    try:
        serialized = prepared.grammar.serialize_json().encode()
    except (RuntimeError, MemoryError):  # for lack of memory; the engine process compiles it
        return None
    if len(serialized) > min(_MAX_SENT_BYTES, compile_s * limits.sent_bytes_per_s):
        return None
    return SentGrammar(serialized, prepared.first_ending, prepared.reserve)


def _short_of_resources(spec: GrammarSpec) -> str:
    return (
        f"this {spec.kind} could not be compiled, because the machine is short of memory or CPU time; try again, or use a "
        "simpler one"
    )


def _too_slow(spec: GrammarSpec, limits: TrialLimits) -> str:
    return f"not a usable {spec.kind}: it takes longer than {limits.cpu_s} s to compile; {_ADVICE}"


def _too_large(spec: GrammarSpec, limits: TrialLimits) -> str:
    return f"not a usable {spec.kind}: it takes more than {limits.num_bytes >> 20} MiB to compile; {_ADVICE}"


if __name__ == "__main__":
    main()
