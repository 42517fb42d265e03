"""What the suffix drafter must find, and what it must keep apart."""

from __future__ import annotations

import random

from stoker.sched.drafting import TapeDrafter
from stoker.spec.drafter import build_drafter
from stoker.spec.drafters import suffix
from stoker.spec.drafters.suffix import SuffixDrafter
from stoker.spec.token_history import BORDER, TokenHistory
from tests.spec.sequences import new_parts, new_sequence

CALL = list(range(100, 130))


def drafter_after(*outputs: list[int], salt: str = "") -> TapeDrafter:
    drafter = build_drafter("suffix", new_parts())
    for output in outputs:
        drafter.ended(new_sequence([1, 2, 3], output, salt))
    return drafter


def test_an_earlier_output_is_continued_to_its_end() -> None:
    drafter = drafter_after(CALL)
    assert drafter.propose(new_sequence([9, 9, 9], CALL[:3]), 64) == CALL[3:]


def test_the_prompts_last_tokens_tell_how_an_output_begins() -> None:
    assert drafter_after(CALL).propose(new_sequence([7, 1, 2, 3]), 5) == CALL[:5]


def test_the_most_frequent_continuation_wins_over_the_newest() -> None:
    often, once = [*CALL[:5], 50, 51], [*CALL[:5], 60, 61]
    drafter = drafter_after(often, often, once)
    assert drafter.propose(new_sequence([9], CALL[:5]), 8) == [50, 51]


def test_a_continuation_is_cut_where_it_is_unlikely() -> None:
    drafter = drafter_after(*([*CALL[:6], token_id] for token_id in range(50, 55)))
    assert drafter.propose(new_sequence([9], CALL[:4]), 8) == CALL[4:6]


def test_a_longer_match_wins_over_more_frequent_shorter_ones() -> None:
    drafter = drafter_after([1, 2, 3, 4, 5, 40], *([9, 3, 4, 5, 50] for _ in range(5)))
    assert drafter.propose(new_sequence([8], [1, 2, 3, 4, 5]), 8) == [40]


def test_the_running_sequences_own_output_counts() -> None:
    seq = new_sequence([1], [10, 11, 12, 13, 14, 90, 10, 11, 12])
    assert drafter_after().propose(seq, 3) == [13, 14, 90]


def test_two_texts_do_not_run_into_each_other() -> None:
    drafter = drafter_after(CALL, [500, 501, 502, 503])
    assert drafter.propose(new_sequence([9], CALL[-3:]), 8) == []


def test_another_salt_sees_nothing() -> None:
    drafter = drafter_after(CALL, salt="alice")
    assert drafter.propose(new_sequence([9], CALL[:5], "bob"), 8) == []
    assert drafter.propose(new_sequence([9], CALL[:5]), 8) == []
    assert drafter.propose(new_sequence([9], CALL[:5], "alice"), 8) == CALL[5:13]


def test_the_number_of_salts_is_bounded_and_the_oldest_go_first() -> None:
    drafter = SuffixDrafter(new_parts())
    for i in range(200):
        drafter.ended(new_sequence([1, 2, 3], CALL, f"salt-{i}"))
        drafter.ended(new_sequence([1, 2, 3], CALL, "kept"))
    assert len(drafter._histories) == suffix._MAX_SALTS
    assert drafter.propose(new_sequence([9], CALL[:5], "salt-3"), 3) == []
    assert drafter.propose(new_sequence([9], CALL[:5], "salt-199"), 3) == CALL[5:8]
    assert drafter.propose(new_sequence([9], CALL[:5], "kept"), 3) == CALL[5:8]


def test_a_history_finds_what_a_plain_search_finds() -> None:
    """Also after its ring buffer was overwritten many times."""
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    history, text = TokenHistory(64), [0, 0]
    history.add(text)
    for _ in range(500):
        text.append(rng.choice([1, 2, 3, BORDER]))
        history.add(text[-1:])
        oldest = max(3, len(text) - 63 + 3)
        found = list(history.occurrences(text))
        expected = [i for i in range(len(text) - 1, oldest - 1, -1) if text[i - 3 : i] == text[-3:]]
        assert found == expected
        for position in found:
            length = history.match_length(position, text, 8)
            assert 3 <= length <= 8
            assert text[position - length : position] == text[len(text) - length :]
            following = text[position : position + 9]
            assert history.text_from(position, 9) == following[: [*following, BORDER].index(BORDER)]
