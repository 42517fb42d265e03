"""TapeDrafting beside a draft model: its guesses are unknown to the host, which sees only what was accepted."""

from __future__ import annotations

import pytest

from stoker.base.errors import ConfigError
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.draft_tape import MODEL_GUESSES
from stoker.sched.drafting import TapeDrafter
from stoker.sched.sequence import Sequence
from stoker.sched.step_costs import StepCosts
from stoker.spec.choose_drafters import DrafterChoice
from stoker.spec.draft_counts import DraftCounts
from stoker.spec.drafter import DrafterParts
from stoker.spec.tape_drafting import TapeDrafting
from tests.spec.sequences import new_sequence

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
    assert step(drafting, seq, 0) == 2  # the tape
    for _ in range(4):
        assert step(drafting, seq, 2) == MODEL_GUESSES
    assert counts.by_source["first"].num_drafts == 2
    assert (counts.by_source["eagle3"].num_drafts, counts.by_source["eagle3"].num_accepted) == (4 * MODEL_GUESSES, 8)


def test_a_model_that_is_always_wrong_is_tried_rarely_and_comes_back_if_it_improves() -> None:
    drafting, seq = TapeDrafting({}, DraftCounts(), "eagle3"), new_sequence([1])
    wrong = [step(drafting, seq, 0, DEAR) for _ in range(400)]
    assert sum(wrong[100:]) <= 6, "one draft in 64 tokens"
    assert sum(wrong[100:]) >= 3, "it is still tried"
    right = [step(drafting, seq, 3, DEAR) for _ in range(4000)]
    assert sum(right[-100:]) >= 100


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
