"""How the output is followed through the request's prediction."""

from __future__ import annotations

import random

import pytest

from stoker.spec.drafter import build_drafter
from stoker.spec.drafters import prediction
from tests.spec.sequences import VOCAB_SIZE, new_parts, new_sequence

TEXT = list(range(100, 160))


def test_an_output_that_agrees_gets_the_rest_of_the_prediction() -> None:
    seq = new_sequence([1, 2, 3], prediction=TEXT)
    drafter = build_drafter("prediction", new_parts())
    for known in (0, 1, 7, 59, 60):
        seq.token_ids[3:] = TEXT[:known]
        assert drafter.propose(seq, 5) == TEXT[known : known + 5]


def test_a_request_without_prediction_has_no_guess() -> None:
    assert build_drafter("prediction", new_parts()).propose(new_sequence(TEXT), 5) == []


@pytest.mark.parametrize(
    ("output", "rest"),
    [
        ([*TEXT[:10], 7, 8, *TEXT[10:12]], TEXT[12:]),  # inserted
        ([*TEXT[:10], *TEXT[20:22]], TEXT[22:]),  # left out
        ([*TEXT[:10], 7, *TEXT[11:13]], TEXT[13:]),  # replaced
        ([7, 8, 9, *TEXT[:2]], TEXT[2:]),  # something before all of it, such as reasoning
        ([*TEXT[:10], 7], []),
        ([*TEXT[:10], 7, 8, 9], []),
        ([*TEXT, 5, 6], []),  # the prediction has ended
    ],
)
def test_a_divergence_is_survived(output: list[int], rest: list[int]) -> None:
    for chunk in (1, 3, len(output)):
        drafter, seq = build_drafter("prediction", new_parts()), new_sequence([1], prediction=TEXT)
        for i in range(0, len(output), chunk):
            seq.token_ids += output[i : i + chunk]
            guesses = drafter.propose(seq, 64)
        assert guesses == rest


def test_a_wrong_place_does_not_use_up_the_prediction() -> None:
    """[5, 6] also stands near the end. The output continues at the beginning."""
    prediction = [*TEXT[:20], 5, 6, 7]
    seq = new_sequence([1], [90, 5, 6], prediction=prediction)
    drafter = build_drafter("prediction", new_parts())
    assert drafter.propose(seq, 3) == [7]
    seq.token_ids += TEXT[:2]
    assert drafter.propose(seq, 3) == TEXT[2:5]


def test_the_beginning_of_the_prompt_is_not_compared() -> None:
    seq = new_sequence(TEXT, prediction=TEXT)
    assert build_drafter("prediction", new_parts()).propose(seq, 2) == TEXT[:2]


def test_ids_outside_the_vocabulary_end_a_guess() -> None:
    for bad in (-VOCAB_SIZE - 1, VOCAB_SIZE, 1 << 40):
        seq = new_sequence([1], prediction=[3, bad, 4, 5, 6])
        drafter = build_drafter("prediction", new_parts())
        assert drafter.propose(seq, 5) == [3]
        seq.token_ids += [3, 9, 4, 5]
        assert drafter.propose(seq, 5) == [6]


def test_an_edited_text_is_mostly_predicted() -> None:
    seed = 3
    print(f"seed {seed}")
    rng = random.Random(seed)
    prediction = [rng.randrange(200) for _ in range(600)]
    output = list(prediction)
    for i in sorted(rng.sample(range(600), 12), reverse=True):
        output[i : i + rng.randrange(3)] = [rng.randrange(200, 400) for _ in range(rng.randrange(4))]
    seq, drafter = new_sequence([1], prediction=prediction), build_drafter("prediction", new_parts())
    num_right = 0
    for token_id in output:
        num_right += drafter.propose(seq, 1) == [token_id]
        seq.token_ids.append(token_id)
    assert num_right > 0.85 * len(output)


def test_a_place_far_ahead_is_not_searched() -> None:
    """A search delays all rows, and the client chooses the length of the prediction."""
    drafter = build_drafter("prediction", new_parts())
    near, far = [*[1] * 8000, 5, 6, 7], [*[1] * 9000, 5, 6, 7]
    assert drafter.propose(new_sequence([1], [5, 6], prediction=near), 3) == [7]
    assert drafter.propose(new_sequence([1], [5, 6], prediction=far), 3) == []


def test_an_output_that_is_read_late_is_searched_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another drafter is right, this one is not asked for thousands of tokens."""
    searches: list[list[int]] = []
    search = prediction._find
    monkeypatch.setattr(prediction, "_find", lambda window, tokens: searches.append(tokens) or search(window, tokens))
    drafter = build_drafter("prediction", new_parts())
    output = [*[7] * 5000, *TEXT[:6]]
    assert drafter.propose(new_sequence([1], output, prediction=TEXT), 3) == TEXT[6:9]
    assert 0 < len(searches) <= 12
