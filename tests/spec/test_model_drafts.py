"""TapeDrafting beside a draft model: its guesses are unknown to the host, which sees only what was accepted."""

from __future__ import annotations

import random

import pytest

from stoker.base.errors import ConfigError
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.draft_tape import MAX_GUESSES, MODEL_GUESSES
from stoker.sched.drafting import TapeDrafter
from stoker.sched.sequence import Sequence
from stoker.sched.step_costs import StepCosts, StepTimes
from stoker.spec.choose_drafters import DrafterChoice
from stoker.spec.draft_counts import DraftCounts
from stoker.spec.drafter import DrafterParts
from stoker.spec.tape_drafting import TapeDrafting
from tests.spec.sequences import new_sequence

UNKNOWN = StepCosts()
CHEAP = StepCosts(fixed_s=1.0, token_s=1e-6)
DEAR = StepCosts(fixed_s=1e-3, token_s=1e-3)  # a draft costs half as much as the step


class FirstTokens:
    """Guesses two tokens, and only at the start of an answer."""

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        return [] if len(seq.token_ids) > seq.request.num_prompt else [5, 6]

    def ended(self, seq: Sequence) -> None: ...


def step(drafting: TapeDrafting, seq: Sequence, num_right: int, costs: StepCosts = CHEAP) -> int:
    """Plan one step, of whose drafts `num_right` are right. Return the number of drafts."""
    num_drafts = drafting.plan([seq], 100, costs).get(seq, 0)
    sampled = [9] * (1 + min(num_right, num_drafts))
    if num_drafts:
        drafting.launched([seq])
        drafting.committed(seq, num_drafts, sampled)
    seq.token_ids += sampled
    return num_drafts


def test_sequences_without_a_tape_verify_the_models_guesses() -> None:
    drafters: dict[str, TapeDrafter] = {"first": FirstTokens()}
    counts = DraftCounts()
    drafting, seq = TapeDrafting(drafters, counts, "eagle3"), new_sequence([1, 2, 3])
    assert step(drafting, seq, 0, UNKNOWN) == 2  # the tape
    for _ in range(4):
        assert step(drafting, seq, 2, UNKNOWN) == MODEL_GUESSES
    assert counts.by_source["first"].num_drafts == 2
    assert (counts.by_source["eagle3"].num_drafts, counts.by_source["eagle3"].num_accepted) == (4 * MODEL_GUESSES, 8)


def test_a_model_that_is_always_wrong_is_tried_rarely_and_comes_back_if_it_improves() -> None:
    drafting, seq = TapeDrafting({}, DraftCounts(), "eagle3"), new_sequence([1])
    wrong = [step(drafting, seq, 0, DEAR) for _ in range(400)]
    assert sum(wrong[100:]) <= 6, "one draft in 64 tokens"
    assert sum(wrong[100:]) >= 3, "it is still tried"
    right = [step(drafting, seq, 3, DEAR) for _ in range(4000)]
    assert sum(right[-100:]) >= 100


class SimulatedModel:
    """A model whose guesses are right with one probability, on a device with these costs. Steps take a virtual time."""

    def __init__(self, costs: StepCosts, rate: float, num_rows: int) -> None:
        self._costs, self._rate, self._num_rows = costs, rate, num_rows

    def seconds(self, num_drafts: int, num_guesses: int) -> float:
        costs = self._costs
        return costs.decode_s(self._num_rows) + num_drafts * costs.token_s + num_guesses * costs.guess_s

    def fixed_speed(self, num_guesses: int) -> float:
        """Return the tokens per second if every step makes and verifies this many guesses."""
        tokens = self._num_rows * sum(self._rate**number for number in range(num_guesses + 1))
        return tokens / self.seconds(self._num_rows * num_guesses, num_guesses)

    def chosen_speed(self, num_steps: int) -> float:
        """Return the tokens per second with the numbers that the drafting chooses, after the first 100 steps."""
        rng, times, drafting = random.Random(0), StepTimes(), TapeDrafting({}, DraftCounts(), "eagle3")
        seqs = [new_sequence([1]) for _ in range(self._num_rows)]
        num_tokens, total_s = 0, 0.0
        for number in range(num_steps):
            planned = drafting.plan(seqs, 10_000, times.costs)
            num_drafts, num_guesses = sum(planned.values()), drafting.num_guesses
            drafting.launched(planned)
            step_s = self.seconds(num_drafts, num_guesses) * rng.uniform(0.98, 1.02)
            times.record(self._num_rows + num_drafts, self._num_rows, step_s, num_guesses)
            for seq in seqs:
                most, right = planned.get(seq, 0), 0
                while right < most and rng.random() < self._rate:
                    right += 1
                if most:
                    drafting.committed(seq, most, [9] * (right + 1))
                seq.token_ids += [9] * (right + 1)
                num_tokens += (right + 1) * (number >= 100)
            total_s += step_s * (number >= 100)
        return num_tokens / total_s


GPU = StepCosts(4e-3, 24e-6, 5e-6, 2e-4)
BUSY = StepCosts(1e-4, 1e-3, 0.0, 1e-4)


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("costs", [GPU, BUSY], ids=["gpu", "busy"])
def test_the_number_of_guesses_is_nearly_as_fast_as_the_best_fixed_one(
    costs: StepCosts, rate: float, num_rows: int
) -> None:
    model = SimulatedModel(costs, rate, num_rows)
    best = max(model.fixed_speed(number) for number in range(MAX_GUESSES + 1))
    speed = model.chosen_speed(250)
    assert speed >= 0.93 * best
    assert speed >= 0.98 * model.fixed_speed(0)


def test_rows_differ_in_how_many_guesses_they_verify() -> None:
    """One sequence accepts all of its guesses and the other none of them."""
    drafting = TapeDrafting({}, DraftCounts(), "eagle3")
    good, bad = seqs = [new_sequence([1]), new_sequence([2])]
    lengths = []
    for _ in range(80):
        planned = drafting.plan(seqs, 100, GPU)
        drafting.launched(planned)
        for seq in seqs:
            num_right = planned.get(seq, 0) if seq is good else 0
            if seq in planned:
                drafting.committed(seq, planned[seq], [9] * (1 + num_right))
            seq.token_ids += [9] * (1 + num_right)
        lengths.append(planned)
    assert sum(planned.get(good, 0) for planned in lengths[-20:]) > 20 * MODEL_GUESSES
    assert max(planned.get(bad, 0) for planned in lengths[-20:]) <= 1, "a draft costs little here"


def test_a_step_without_room_for_drafts_has_none() -> None:
    drafting, seq = TapeDrafting({}, DraftCounts(), "eagle3"), new_sequence([1])
    assert drafting.plan([seq], 0, CHEAP) == {}
    assert sum(drafting.plan([seq, new_sequence([2])], 4, CHEAP).values()) <= 4


def test_the_setting_names_a_folder_and_may_name_tapes_besides() -> None:
    choice = DrafterChoice.parse("auto,eagle3:/some/head")
    assert choice.draft_model == "eagle3"
    assert choice.arguments["eagle3"] == "/some/head"
    assert DrafterChoice.parse("mtp").draft_model == "mtp"
    assert {"cache", "ngram", "grammar"} < set(choice.arguments)
    choice.build(DrafterParts(BlockPool(2), 10), DraftCounts())
    assert DrafterChoice.parse("ngram").draft_model is None
    assert DrafterChoice.parse("off").draft_model is None
    with pytest.raises(ConfigError, match="eagle3:FOLDER"):
        DrafterChoice.parse("eagle3")
    with pytest.raises(ConfigError, match="takes no argument"):
        DrafterChoice.parse("mtp:/some/head")
    with pytest.raises(ConfigError, match="one draft model"):
        DrafterChoice.parse("mtp,eagle3:/some/head")
