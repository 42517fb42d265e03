"""The fuzzers work: every target runs its seeds and the saved inputs of old bugs, and planted bugs are found."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from tests.fuzz.campaign import CORPUS, Campaign, Hang, TooMuchMemory, hang_detection, run_input, save
from tests.fuzz.target import FuzzTarget, load_target, target_names

SEED = 7
LONG_S = 60.0  # a planted bug is found at once; a busy machine may need longer


@pytest.mark.parametrize("name", target_names())
def test_seeds_and_saved_inputs_pass(name: str) -> None:
    target = load_target(name)
    saved = [path.read_bytes() for path in sorted((CORPUS / name).glob("*.bin"))]
    with hang_detection():
        for data in [*target.seeds(), b"", *saved]:
            run_input(target, data)


@pytest.mark.parametrize("folder", sorted(CORPUS.iterdir()), ids=lambda folder: folder.name)
def test_every_saved_input_belongs_to_a_target(folder: Path) -> None:
    assert folder.name in target_names()


def planted(bug: str) -> FuzzTarget:
    """A JSON reader with a bug behind a condition that random bytes alone do not reach."""

    def execute(data: bytes, rng: random.Random) -> None:
        value = json.loads(data)
        if isinstance(value, dict) and isinstance(value.get("count"), int) and not 0 <= value["count"] <= 100:
            if bug == "crash":
                raise KeyError("planted")
            if bug == "hang":
                time.sleep(60)
            bytearray(64 << 20)

    limits = {"max_s": 0.3} if bug == "hang" else {}
    return FuzzTarget(execute, lambda: [b'{"count": 5}'], errors=(ValueError, RecursionError), **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bug", "error"), [("crash", KeyError), ("hang", Hang)])
def test_a_planted_bug_is_found_and_saved(bug: str, error: type[BaseException], tmp_path: Path) -> None:
    target = planted(bug)
    result = Campaign(target, SEED).run(LONG_S)
    assert result.failure is not None
    assert isinstance(result.failure.error, error)
    path = save("planted", result.failure, tmp_path)
    with hang_detection(), pytest.raises(error):
        run_input(target, path.read_bytes())
    assert bug != "crash" or len(path.read_bytes()) <= len(b'{"count": -1}') + 5  # it was made small


def test_too_much_memory_is_found() -> None:
    with hang_detection(), pytest.raises(TooMuchMemory, match="for an input of 13 bytes"):
        run_input(planted("memory"), b'{"count": -1}', measure=True)


def test_a_seed_repeats_a_campaign() -> None:
    first, again = (Campaign(planted("crash"), SEED).run(LONG_S).failure for _ in range(2))
    assert first is not None
    assert again is not None
    assert first.data == again.data
