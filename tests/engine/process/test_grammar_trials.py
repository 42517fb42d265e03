"""Grammar trials: a grammar of unknown cost is first compiled in a helper process, within limits."""

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
import torch
from waiting import until

from stoker.base.errors import InvalidRequest
from stoker.engine.process.grammars.compile_cost import is_cheap_to_compile
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.engine.process.grammars.matcher import XGrammarMatcher
from stoker.engine.process.grammars.rejections import Rejections
from stoker.engine.process.grammars.trials import GrammarTrials, TrialLimits
from stoker.sched.request import GrammarSpec
from stoker.text.tokenizer import Tokenizer

VOCAB_SIZE = 49152
# Takes more than 15 minutes to compile.
ENDLESS = "".join(f"([^{chr(97 + i % 26)}{i}]{{1,1000}}){{1,1000}}" for i in range(1000))
LARGE = "(a?){3000}a{3000}"  # takes some hundred MiB to compile


def schema(**fields: object) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps({"type": "object", "properties": fields}))


@pytest.fixture(scope="module")
def trials(smollm2: Path) -> Iterator[GrammarTrials]:
    made = GrammarTrials(smollm2, VOCAB_SIZE, TrialLimits(cpu_s=1))
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
def test_which_grammars_are_compiled_without_a_trial(spec: GrammarSpec, expected: bool) -> None:
    assert is_cheap_to_compile(spec) is expected


def test_a_valid_regex_passes_and_an_invalid_one_gets_the_reason(trials: GrammarTrials) -> None:
    trials.check(GrammarSpec("regex", "(ab)+"))
    with pytest.raises(InvalidRequest, match=r"not a usable regex: .*parenthesis"):
        trials.check(GrammarSpec("regex", "(ab)+("))
    trials.check(GrammarSpec("regex", "(ab)+c"))


def test_an_endless_regex_is_rejected_and_the_second_time_without_a_trial(trials: GrammarTrials) -> None:
    with pytest.raises(InvalidRequest, match="longer than 1 s to compile") as refused:
        trials.check(GrammarSpec("regex", ENDLESS))
    assert refused.value.code == "invalid_grammar"
    trials.close()
    with pytest.raises(InvalidRequest, match="longer than 1 s to compile"):
        trials.check(GrammarSpec("regex", ENDLESS))
    assert trials.pid is None


def test_a_regex_that_needs_too_much_memory_is_rejected(smollm2: Path) -> None:
    trials = GrammarTrials(smollm2, VOCAB_SIZE, TrialLimits(num_bytes=64 << 20))
    try:
        with pytest.raises(InvalidRequest, match="more than 64 MiB"):
            trials.check(GrammarSpec("regex", LARGE))
        trials.check(GrammarSpec("regex", "(a?){30}"))
    finally:
        trials.close()


def test_a_rejection_for_lack_of_cpu_time_is_not_remembered(smollm2: Path) -> None:
    trials = GrammarTrials(smollm2, VOCAB_SIZE, TrialLimits(wall_s=1))
    try:
        for _ in range(2):
            trials.close()
            with pytest.raises(InvalidRequest, match="try again"):
                trials.check(GrammarSpec("regex", ENDLESS))
            assert trials.pid is not None
    finally:
        trials.close()


def test_a_killed_helper_is_restarted(trials: GrammarTrials) -> None:
    trials.check(GrammarSpec("regex", "(ab)*"))
    assert trials.pid is not None
    os.kill(trials.pid, signal.SIGKILL)
    trials.check(GrammarSpec("regex", "(abc)*"))


def test_only_costly_grammars_are_tried_and_only_once(smollm2: Path, trials: GrammarTrials) -> None:
    grammars = XGrammars(Tokenizer.from_folder(smollm2), VOCAB_SIZE, trials)
    with pytest.raises(InvalidRequest, match="longer than 1 s to compile"):
        grammars.prepare(GrammarSpec("regex", ENDLESS))
    kept = grammars.prepare(GrammarSpec("regex", "(abcd)*"))
    trials.close()
    assert grammars.prepare(GrammarSpec("regex", "(abcd)*")) is kept
    grammars.prepare(GrammarSpec("regex", "abcd*"))
    assert trials.pid is None


def test_a_grammar_that_takes_long_is_compiled_only_in_its_trial(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's copy must behave as one that it compiled itself."""
    trials = GrammarTrials(smollm2, VOCAB_SIZE, TrialLimits(worth_sending_s=0.0, sent_bytes_per_s=1e12))
    grammars = XGrammars(Tokenizer.from_folder(smollm2), VOCAB_SIZE, trials)
    spec = GrammarSpec("ebnf", "root ::= " + " | ".join(f'"choice number {number}"' for number in range(500)))
    expected = grammars._compile(spec)
    try:
        monkeypatch.setattr(XGrammars, "_compile", lambda *_: pytest.fail("compiled again"))
        prepared = grammars.prepare(spec)
    finally:
        trials.close()
    assert (prepared.first_ending, prepared.reserve) == (expected.first_ending, expected.reserve)
    ours, theirs = XGrammarMatcher(prepared), XGrammarMatcher(expected)
    for token_id in grammars._tokenizer.encode("choice number 321"):
        masks = torch.zeros(2, -(-VOCAB_SIZE // 32), dtype=torch.int32)
        ours.fill(masks[0])
        theirs.fill(masks[1])
        assert torch.equal(masks[0], masks[1])
        assert ours.accept(token_id)
        assert theirs.accept(token_id)


def test_rejections_are_remembered_up_to_a_size() -> None:
    rejections = Rejections(max_bytes=10_000)
    specs = [GrammarSpec("regex", f"({number}") for number in range(100)]
    for spec in specs:
        rejections.add(spec, "no " * 20)
    assert 5 < len(rejections) < 25
    rejections.check(specs[0])  # forgotten
    with pytest.raises(InvalidRequest, match="no no"):
        rejections.check(specs[-1])


def test_an_invalid_cheap_grammar_is_not_compiled_twice(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = XGrammars(Tokenizer.from_folder(smollm2), VOCAB_SIZE)
    spec = GrammarSpec("regex", "(ab")
    reasons = set()
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            grammars.prepare(spec)
        reasons.add(refused.value.message)
        monkeypatch.setattr(XGrammars, "_compile", lambda *_: pytest.fail("compiled again"))
    assert len(reasons) == 1


def processes(folder: Path) -> list[int]:
    """Return the process ids of the helpers of this folder and of their forks."""
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


def test_no_process_is_left_if_the_engine_is_killed_during_a_trial(smollm2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"  # a folder of its own, so that the helpers of other tests are not counted
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


def test_a_slow_trial_does_not_delay_others(smollm2: Path) -> None:
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
        while endless.is_alive():  # a second helper tries it again
            trials.close()
            endless.join(0.1)


def test_each_thread_gets_the_result_of_its_own_grammar(trials: GrammarTrials) -> None:
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
