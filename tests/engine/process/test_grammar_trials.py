"""Grammars that are tried before they are compiled: within limits, by a process that can be stopped and leaves nobody behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import until

from stoker.base.errors import InvalidRequest
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.engine.process.grammars.trials import GrammarTrials, Limits, is_tame
from stoker.sched.request import GrammarSpec
from stoker.text.tokenizer import Tokenizer

VOCAB_SIZE = 49152
# A quarter of an hour and more.
ENDLESS = "".join(f"([^{chr(97 + i % 26)}{i}]{{1,1000}}){{1,1000}}" for i in range(1000))
LARGE = "(a?){3000}a{3000}"  # some hundred MiB


def schema(**fields: object) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps({"type": "object", "properties": fields}))


@pytest.fixture(scope="module")
def trials(smollm2: Path) -> Iterator[GrammarTrials]:
    made = GrammarTrials(smollm2, VOCAB_SIZE, Limits(cpu_s=1))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (GrammarSpec("json_object"), True),
        (GrammarSpec("regex", r"\d{4}-\d{2}-\d{2}"), True),
        (GrammarSpec("regex", "(yes|no)"), True),
        (GrammarSpec("regex", "(yes|no)*"), False),
        (GrammarSpec("regex", "(yes|no){1,3}"), False),
        (GrammarSpec("regex", "a{3000}"), False),
        (GrammarSpec("regex", "a{1,3000}"), False),
        (GrammarSpec("regex", "a{1, 3000}"), False),
        (GrammarSpec("regex", f"a{{{'9' * 1000}}}"), False),
        (GrammarSpec("regex", "{" + " " * 1000), True),
        (GrammarSpec("regex", "a" * 1025), False),
        (GrammarSpec("ebnf", 'root ::= "a"'), False),
        (schema(name={"type": "string"}), True),
        (schema(name={"type": "string", "maxLength": 200}), True),
        (schema(name={"type": "string", "maxLength": 5000}), False),
        (schema(name={"type": "string", "maxLength": 1e22}), False),
        (schema(name={"type": "string", "maxLength": 10**4000}), False),
        (schema(**{f"p{i}": {"type": "string", "maxLength": 200} for i in range(20)}), False),
        (schema(name={"type": "string", "pattern": "a"}), False),
        (GrammarSpec("structural_tag", '{"format": {"type": "grammar", "grammar": ""}}'), False),
    ],
)
def test_what_is_compiled_without_a_trial(spec: GrammarSpec, expected: bool) -> None:
    assert is_tame(spec) is expected


def test_a_usable_expression_gets_through_and_a_wrong_one_is_told_why(trials: GrammarTrials) -> None:
    trials.check(GrammarSpec("regex", "(ab)+"))
    with pytest.raises(InvalidRequest, match=r"not a usable regex: .*parenthesis"):
        trials.check(GrammarSpec("regex", "(ab)+("))
    trials.check(GrammarSpec("regex", "(ab)+c"))


def test_an_expression_that_would_never_end_is_refused_and_so_once_more_without_a_trial(trials: GrammarTrials) -> None:
    with pytest.raises(InvalidRequest, match="longer than 1 s to compile") as refused:
        trials.check(GrammarSpec("regex", ENDLESS))
    assert refused.value.code == "invalid_grammar"
    trials.close()
    with pytest.raises(InvalidRequest, match="longer than 1 s to compile"):
        trials.check(GrammarSpec("regex", ENDLESS))
    assert trials.pid is None


def test_an_expression_that_would_take_all_memory_is_refused(smollm2: Path) -> None:
    trials = GrammarTrials(smollm2, VOCAB_SIZE, Limits(num_bytes=64 << 20))
    try:
        with pytest.raises(InvalidRequest, match="more than 64 MiB"):
            trials.check(GrammarSpec("regex", LARGE))
        trials.check(GrammarSpec("regex", "(a?){30}"))
    finally:
        trials.close()


def test_what_a_starved_machine_could_not_try_is_tried_again(smollm2: Path) -> None:
    trials = GrammarTrials(smollm2, VOCAB_SIZE, Limits(wall_s=1))
    try:
        for _ in range(2):
            trials.close()
            with pytest.raises(InvalidRequest, match="try again"):
                trials.check(GrammarSpec("regex", ENDLESS))
            assert trials.pid is not None
    finally:
        trials.close()


def test_a_helper_that_was_killed_is_started_anew(trials: GrammarTrials) -> None:
    trials.check(GrammarSpec("regex", "(ab)*"))
    assert trials.pid is not None
    os.kill(trials.pid, signal.SIGKILL)
    trials.check(GrammarSpec("regex", "(abc)*"))


def test_grammars_try_what_is_not_tame_and_once(smollm2: Path, trials: GrammarTrials) -> None:
    grammars = XGrammars(Tokenizer.from_folder(smollm2), VOCAB_SIZE, trials)
    with pytest.raises(InvalidRequest, match="longer than 1 s to compile"):
        grammars.prepare(GrammarSpec("regex", ENDLESS))
    kept = grammars.prepare(GrammarSpec("regex", "(abcd)*"))
    trials.close()
    assert grammars.prepare(GrammarSpec("regex", "(abcd)*")) is kept
    grammars.prepare(GrammarSpec("regex", "abcd*"))
    assert trials.pid is None


def processes(folder: Path) -> list[int]:
    """All that try grammars of this folder, helpers and forks of theirs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"stoker.engine.process.grammars.trial_helper" in command and os.fsencode(folder) in command:
                found.append(int(entry.name))
    return found


def test_nobody_is_left_when_the_engine_is_killed_in_the_middle_of_a_trial(smollm2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"  # of our own, so that other tests' helpers are not looked at
    folder.symlink_to(smollm2)
    engine = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from stoker.sched.request import GrammarSpec\n"
            "from stoker.engine.process.grammars.trials import GrammarTrials\n"
            f"GrammarTrials(Path(sys.argv[1]), {VOCAB_SIZE}).check(GrammarSpec('regex', sys.argv[2]))",
            str(folder),
            ENDLESS,
        ]
    )
    try:
        asyncio.run(until(lambda: len(processes(folder)) == 2))
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        asyncio.run(until(lambda: not processes(folder)))
    finally:
        engine.kill()
        for pid in processes(folder):
            os.kill(pid, signal.SIGKILL)


def test_a_trial_that_takes_long_holds_up_no_other(smollm2: Path) -> None:
    trials = GrammarTrials(smollm2, VOCAB_SIZE)

    def ask() -> None:
        with suppress(RuntimeError):
            trials.check(GrammarSpec("regex", ENDLESS))

    endless = threading.Thread(target=ask)
    endless.start()
    try:
        asyncio.run(until(lambda: trials.pid is not None))
        trials.check(GrammarSpec("regex", "(ab)*"))
        assert endless.is_alive()
    finally:
        while endless.is_alive():  # it is tried once more by another helper
            trials.close()
            endless.join(0.1)


def test_verdicts_go_to_those_who_asked(trials: GrammarTrials) -> None:
    refused: list[int] = []

    def ask(number: int) -> None:
        text = f"(a{number})*" + "(" * (number % 2)
        try:
            trials.check(GrammarSpec("regex", text))
        except InvalidRequest:
            refused.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(refused) == [1, 3, 5, 7]
