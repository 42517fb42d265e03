"""What the n-gram drafter must find."""

from __future__ import annotations

import random

import pytest

from stoker.sched.sequence import Sequence
from stoker.spec.drafter import build_drafter
from stoker.spec.ngram_table import WINDOW, NgramTable
from tests.spec.sequences import new_parts, new_sequence


def guesses_of(seq: Sequence, max_tokens: int = 8) -> list[int]:
    return build_drafter("ngram", new_parts()).propose(seq, max_tokens)


def expected(token_ids: list[int]) -> list[int]:
    """The longest of the last 4 to 2 tokens that occurred before, latest occurrence, by a plain search."""
    for size in (4, 3, 2):
        for position in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[position - size : position] == token_ids[-size:]:
                return token_ids[position : position + 1]
    return []


def occurs(part: list[int], text: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text)))


def test_the_output_copies_from_the_prompt() -> None:
    seq = new_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], [50, 3, 4])
    assert guesses_of(seq, 4) == [5, 6, 7, 8]


def test_the_longest_match_wins_over_a_later_one() -> None:
    seq = new_sequence([1, 2, 3, 4, 10, 11, 9, 3, 4, 20, 21], [1, 2, 3, 4])
    assert guesses_of(seq, 2) == [10, 11]


def test_the_latest_of_equal_matches_wins() -> None:
    assert guesses_of(new_sequence([1, 2, 10, 1, 2, 20, 1, 2]), 1) == [20]


def test_a_repeated_text_is_continued_beyond_its_end() -> None:
    assert guesses_of(new_sequence([1, 2, 3, 1, 2, 3, 1, 2]), 7) == [3, 1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("token_ids", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5]])
def test_a_text_without_repetition_has_no_guess(token_ids: list[int]) -> None:
    assert guesses_of(new_sequence(token_ids)) == []


@pytest.mark.parametrize("seed", range(8))
def test_guesses_are_those_of_a_plain_search_however_the_text_grows(seed: int) -> None:
    """A few are lost to hash collisions. Those that are made always continue an earlier occurrence."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    seq = new_sequence([rng.randrange(6) for _ in range(rng.randrange(1, 400))])
    drafter = build_drafter("ngram", new_parts())
    num_equal = 0
    for _ in range(150):
        guesses = drafter.propose(seq, 1)
        num_equal += guesses == expected(seq.token_ids)
        assert not guesses or occurs([*seq.token_ids[-2:], *guesses], seq.token_ids)
        seq.token_ids += [rng.randrange(6) for _ in range(rng.randrange(1, 4))]
    assert num_equal >= 135


def test_a_table_has_a_fixed_largest_size() -> None:
    rng = random.Random(0)
    table, text = NgramTable(), [rng.randrange(50_000) for _ in range(2 * WINDOW)]
    table.update(text)
    size = table._last.nbytes
    text += [rng.randrange(50_000) for _ in range(WINDOW)] + text[WINDOW + 100 : WINDOW + 104]
    table.update(text)
    assert table._last.nbytes == size == 512 << 10


def test_a_prompt_that_is_longer_than_the_window_is_searched_near_its_end() -> None:
    prompt = list(range(3 * WINDOW))
    table, text = NgramTable(), [*prompt, *prompt[-100:-96]]
    table.update(text)
    assert table.find(text) == len(prompt) - 96
