"""TapeDrafting: a sequence follows its tape until a token differs, and useless drafters cost next to nothing."""

from __future__ import annotations

from stoker.sched.draft_tape import TAPE_TOKENS
from stoker.sched.sequence import Sequence
from stoker.sched.step_costs import StepCosts
from stoker.spec.draft_counts import DraftCounts
from stoker.spec.tape_drafting import TapeDrafting
from tests.spec.sequences import new_sequence

UNKNOWN = StepCosts()
CHEAP = StepCosts(fixed_s=1.0, token_s=1e-6)


class ListDrafter:
    """Continues with the tokens of a list, and counts how often it is asked."""

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.num_asked = 0
        self.ended_seqs: list[Sequence] = []

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        self.num_asked += 1
        start = len(seq.token_ids) - seq.request.num_prompt
        return self.text[start : start + max_tokens]

    def ended(self, seq: Sequence) -> None:
        self.ended_seqs.append(seq)


def step(drafting: TapeDrafting, seq: Sequence, answer: list[int], costs: StepCosts = UNKNOWN, rows: int = 1) -> int:
    """Plan one step and commit the tokens that a device would sample for `answer`. Return the number of drafts."""
    others = [new_sequence([7]) for _ in range(rows - 1)]
    num_drafts = drafting.plan([seq, *others], 10_000, costs).get(seq, 0)
    output = len(seq.token_ids) - seq.request.num_prompt
    sampled = answer[output : output + 1]
    if num_drafts:
        assert seq.tape is not None
        drafting.launched([seq])
        guesses = seq.tape.token_ids[len(seq.token_ids) - seq.tape.start :][:num_drafts]
        while len(sampled) <= len(guesses) and guesses[len(sampled) - 1] == sampled[-1]:
            sampled.append(answer[output + len(sampled)])
        drafting.committed(seq, num_drafts, sampled)
    seq.token_ids += sampled
    return num_drafts


def test_a_sequence_follows_its_tape_without_asking_again() -> None:
    text = list(range(200))
    drafter, counts = ListDrafter(text), DraftCounts()
    drafting, seq = TapeDrafting({"list": drafter}, counts), new_sequence([1, 2, 3])
    steps = 0
    while len(seq.token_ids) < 100:
        step(drafting, seq, text)
        steps += 1
    assert drafter.num_asked <= 1 + 100 // (TAPE_TOKENS - 20)
    assert steps <= 9
    assert counts.by_source["list"].num_accepted == counts.by_source["list"].num_drafts


def test_after_a_wrong_guess_the_drafters_are_asked_again() -> None:
    answer = list(range(100))
    drafter = ListDrafter([*answer[:5], 999, *answer[6:]])
    drafting, seq = TapeDrafting({"list": drafter}, DraftCounts()), new_sequence([1])
    step(drafting, seq, answer)
    assert len(seq.token_ids) == 1 + 6  # five drafts and the token instead of the wrong one
    step(drafting, seq, answer)
    assert drafter.num_asked == 2
    assert len(seq.token_ids) > 10


def test_a_drafter_that_is_always_wrong_is_soon_not_verified_but_still_observed() -> None:
    answer = list(range(300))
    drafter = ListDrafter([token + 1 for token in answer])
    drafting, seq = TapeDrafting({"list": drafter}, DraftCounts()), new_sequence([1])
    drafts = [step(drafting, seq, answer, StepCosts(fixed_s=1.0, token_s=0.3)) for _ in range(60)]
    assert sum(drafts[:10]) > 0
    assert sum(drafts[30:]) == 0
    drafter.text = answer  # now it is right: guesses were compared all the time
    drafts = [step(drafting, seq, answer, StepCosts(fixed_s=1.0, token_s=0.3)) for _ in range(20)]
    assert sum(drafts) > 0


def test_in_a_large_batch_a_drafter_without_guesses_is_asked_rarely() -> None:
    drafter = ListDrafter([])
    drafting, seq = TapeDrafting({"list": drafter}, DraftCounts()), new_sequence([1])
    others = [new_sequence([7]) for _ in range(255)]
    for token in range(128):
        drafting.plan([seq, *others], 1000, CHEAP)
        for one in (seq, *others):
            one.token_ids.append(token)
    assert drafter.num_asked < 256 * 128 / 10


def test_the_drafter_that_was_right_more_often_is_asked_first() -> None:
    answer = list(range(400))
    right, wrong = ListDrafter(answer), ListDrafter([token + 1 for token in answer])
    drafting, seq = TapeDrafting({"wrong": wrong, "right": right}, DraftCounts()), new_sequence([1])
    for _ in range(10):
        step(drafting, seq, answer)
    assert seq.tape is None or seq.tape.source == "right"
    other = new_sequence([2])
    drafting.plan([other], 100, UNKNOWN)
    assert other.tape is not None
    assert other.tape.source == "right"


def test_a_suggestion_of_the_runner_becomes_the_tape() -> None:
    drafting, seq = TapeDrafting({}, DraftCounts()), new_sequence([1, 2])
    assert drafting.plan([seq], 100, UNKNOWN) == {}
    drafting.suggested(seq, [5, 6, 7])
    assert drafting.plan([seq], 100, UNKNOWN) == {seq: 3}
    assert seq.tape is not None
    assert (seq.tape.start, seq.tape.token_ids, seq.tape.source) == (2, [5, 6, 7], "grammar")


def test_a_suggestion_for_an_earlier_position_is_ignored() -> None:
    drafting, seq = TapeDrafting({}, DraftCounts()), new_sequence([1, 2])
    drafting.plan([seq], 100, UNKNOWN)
    drafting.suggested(seq, [5, 6, 7])
    seq.token_ids.append(9)
    assert drafting.plan([seq], 100, UNKNOWN) == {}


def test_an_ended_sequence_is_forgotten() -> None:
    drafter = ListDrafter([1, 2, 3, 4, 5, 6])
    drafting, seq = TapeDrafting({"list": drafter}, DraftCounts()), new_sequence([1])
    drafting.plan([seq], 100, UNKNOWN)
    drafting.ended(seq)
    assert drafter.ended_seqs == [seq]
    assert not drafting._followers


def test_drafts_without_room_in_a_step_are_not_counted() -> None:
    """The scheduler plans a step with drafts of `first` and drops them. What it verifies later is from `second`."""
    first, second, counts = ListDrafter([1] * 50), ListDrafter([]), DraftCounts()
    drafting, seq = TapeDrafting({"first": first, "second": second}, counts), new_sequence([1, 2, 3])
    assert drafting.plan([seq], 10_000, UNKNOWN)[seq] > 0
    seq.token_ids.append(9)
    first.text, second.text = [], [8] * 50
    assert step(drafting, seq, [9, *[8] * 50]) > 0
    assert list(counts.by_source) == ["second"]


def test_forced_text_is_drafted_before_any_observation_where_a_guess_of_another_source_does_not_pay() -> None:
    """Most forced text is right. A first answer must not wait for observations of that."""
    dear = StepCosts(fixed_s=1.0, token_s=0.7)
    other, forced = new_sequence([1, 2]), new_sequence([1, 2])
    drafting = TapeDrafting({"list": ListDrafter(list(range(50)))}, DraftCounts())
    others = drafting.plan([other], 100, dear).get(other, 0)
    drafting = TapeDrafting({}, DraftCounts())
    drafting.plan([forced], 100, dear)
    drafting.suggested(forced, list(range(50)))
    assert drafting.plan([forced], 100, dear)[forced] > others


def test_the_forced_beginning_is_asked_before_other_sources() -> None:
    drafting = TapeDrafting({"list": ListDrafter([9] * 8), "grammar": ListDrafter([5] * 8)}, DraftCounts())
    seq = new_sequence([1, 2])
    drafting.plan([seq], 100, UNKNOWN)
    assert seq.tape is not None
    assert seq.tape.source == "grammar"
