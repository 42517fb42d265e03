"""The contract of every registered drafter.

The same sequences get the same guesses, guesses are token ids within the limits, one tenant's text never becomes
another tenant's guess, an ended sequence leaves nothing behind, and neither memory nor work grows without a bound.
"""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from types import FrameType
from typing import Any

import pytest

from stoker.base.errors import ConfigError
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.draft_tape import MAX_DRAFTS, TAPE_TOKENS
from stoker.sched.drafting import TapeDrafter
from stoker.sched.sequence import Sequence
from stoker.spec.drafter import DRAFTERS, DrafterParts, build_drafter, checked_guesses
from tests.spec.sequences import VOCAB_SIZE, fill_pool, new_parts, new_sequence

TENANT_IDS = {"alice": range(500), "bob": range(500, VOCAB_SIZE)}


class DrafterWorld:
    """A drafter and the sequences of its engine, one at a time."""

    def __init__(self, name: str) -> None:
        self.parts = new_parts(num_blocks=256)
        self.drafter: TapeDrafter = build_drafter(name, self.parts)

    def run(self, seq: Sequence, output: list[int], max_tokens: int = MAX_DRAFTS) -> list[list[int]]:
        """Generate the output in steps of one to three tokens. Return the guesses before each step."""
        dice, guesses = random.Random(len(output)), []
        while output:
            guesses.append(self.drafter.propose(seq, max_tokens))
            assert self.drafter.propose(seq, max_tokens) == guesses[-1], "asking must not change the guess"
            count = dice.randrange(1, 4)
            seq.token_ids += output[:count]
            output = output[count:]
        self.end(seq)
        return guesses

    def end(self, seq: Sequence) -> None:
        self.drafter.ended(seq)
        fill_pool(self.parts.pool, seq)
        self.parts.stored.update([seq.block_name(i) for i in range(len(seq.keys))], ())


def tenant_text(salt: str, seed: int, count: int = 60) -> list[int]:
    """A text that repeats itself in parts, from the tenant's own token ids."""
    dice = random.Random(f"{salt} {seed}")
    phrases = [[dice.choice(TENANT_IDS[salt]) for _ in range(6)] for _ in range(4)]
    return [token_id for _ in range(count // 6) for token_id in dice.choice(phrases)]


def repeated_requests(world: DrafterWorld, max_tokens: int = MAX_DRAFTS) -> list[list[int]]:
    """Three times the same request of each tenant, with a prediction that is nearly right and a forced beginning."""
    guesses = []
    for _ in range(3):
        for salt in TENANT_IDS:
            prompt, output = tenant_text(salt, 1), tenant_text(salt, 2)
            prediction = [*output[:20], TENANT_IDS[salt][0], *output[22:]]
            seq = new_sequence(prompt, salt=salt, prediction=prediction, forced=output[:9])
            guesses += world.run(seq, output, max_tokens)
    return guesses


@pytest.fixture(params=list(DRAFTERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_same_sequences_get_the_same_guesses(name: str) -> None:
    guesses = repeated_requests(DrafterWorld(name))
    assert any(guesses), "this drafter guesses nothing, not even in a repeated request"
    assert repeated_requests(DrafterWorld(name)) == guesses


@pytest.mark.parametrize("max_tokens", [0, 1, 2, MAX_DRAFTS, TAPE_TOKENS])
def test_no_guess_is_longer_than_asked_for(name: str, max_tokens: int) -> None:
    assert all(len(guess) <= max_tokens for guess in repeated_requests(DrafterWorld(name), max_tokens))


def test_ids_outside_the_vocabulary_are_never_guessed(name: str) -> None:
    """The prompt may come from a tokenizer with more tokens than the model has."""
    world = DrafterWorld(name)
    text = [3, 4, VOCAB_SIZE, 5, 6, VOCAB_SIZE + 7, 8, 9] * 4
    for _ in range(2):
        for guess in world.run(new_sequence(text, prediction=[*text, -5], forced=text), list(text)):
            assert all(-VOCAB_SIZE <= token_id < VOCAB_SIZE for token_id in guess)  # complements: see DraftTape


def test_one_tenants_text_is_never_anothers_guess(name: str) -> None:
    """Both tenants have the same shared beginning, so that only the salt keeps them apart."""
    world = DrafterWorld(name)
    shared = [7, 8, 9, 10, 11, 12, 13, 14]
    for seed in range(4):
        for salt, ids in TENANT_IDS.items():
            output = [*shared, *tenant_text(salt, seed)]
            for guess in world.run(new_sequence(shared, salt=salt, forced=output[:12]), output):
                assert set(guess) <= set(ids) | set(shared)


def test_an_ended_sequence_is_let_go(name: str) -> None:
    world = DrafterWorld(name)
    output = tenant_text("bob", 2)
    seq = new_sequence(tenant_text("bob", 1), prediction=output, forced=output)
    before = sys.getrefcount(seq)
    world.run(seq, tenant_text("bob", 2))
    world.drafter.ended(seq)  # a second time: nothing happens
    assert sys.getrefcount(seq) == before
    world.drafter.ended(new_sequence([1, 2, 3]))  # it was never asked for a guess


@pytest.mark.slow
def test_memory_is_bounded(name: str) -> None:
    """Ten thousand sequences of hundreds of tenants. A third of them are never reported as ended."""
    world = DrafterWorld(name)
    text = [*TENANT_IDS["bob"]] * 2

    def serve(first: int, count: int) -> int:
        for i in range(first, first + count):
            salt = f"tenant {i % 300}"
            seq = new_sequence(text[i % 491 :][:10], salt=salt, prediction=text[:10], forced=text[:10])
            world.drafter.propose(seq, MAX_DRAFTS)
            seq.token_ids += text[i % 487 :][:6]
            world.drafter.propose(seq, MAX_DRAFTS)
            if i % 3:
                world.end(seq)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = serve(0, 6_500)
        late = serve(6_500, 3_500)
    finally:
        tracemalloc.stop()
    assert late < early + (1 << 20)
    assert late < 128 << 20


def lines_of_proposal(drafter: TapeDrafter, seq: Sequence) -> int:
    """How many lines of Python a proposal runs. It stands for its time, without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        drafter.propose(seq, MAX_DRAFTS)
    finally:
        sys.settrace(before)
    return count


def test_the_work_of_a_guess_does_not_grow_with_the_text(name: str) -> None:
    dice = random.Random(4)
    drafter = DrafterWorld(name).drafter
    for size in (1_000, 30_000):
        text = [dice.randrange(20) for _ in range(size)]
        for _ in range(4):
            drafter.ended(new_sequence(text[:10], text[10:2_000]))
        seq = new_sequence(text, prediction=text, forced=text[:TAPE_TOKENS])
        drafter.propose(seq, MAX_DRAFTS)  # takes in the prompt
        for _ in range(20):
            seq.token_ids.append(dice.randrange(20))
            assert lines_of_proposal(drafter, seq) < 600


def test_an_argument_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        build_drafter(name, DrafterParts(BlockPool(4), VOCAB_SIZE, argument="no such thing"))


@pytest.mark.parametrize(
    ("guesses", "checked"),
    [
        ([1, 2, 3], [1, 2]),
        ([float("nan"), 1], []),
        ([1, None], [1]),
        ([~1, ~2, 2], [~1, ~2]),
        ([1, -VOCAB_SIZE - 1], [1]),
        ([VOCAB_SIZE], []),
        ([1 << 70], []),
        ([True], []),
        ([1.0], []),
    ],
)
def test_garbage_is_removed(guesses: list[object], checked: list[int]) -> None:
    assert checked_guesses(guesses, 2, VOCAB_SIZE) == checked
