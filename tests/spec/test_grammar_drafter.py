"""What a grammar forces at the start of an output is proposed from the first step on."""

from __future__ import annotations

from stoker.sched.step_costs import StepCosts
from stoker.spec.draft_counts import DraftCounts
from stoker.spec.drafter import build_drafter
from stoker.spec.tape_drafting import TapeDrafting
from tests.spec.sequences import new_parts, new_sequence


def test_the_rest_of_the_beginning_is_proposed_while_the_output_agrees() -> None:
    drafter = build_drafter("grammar", new_parts())
    seq = new_sequence([1, 2], forced=[5, 6, 7, 8])
    assert drafter.propose(seq, 64) == [5, 6, 7, 8]
    assert drafter.propose(seq, 2) == [5, 6]
    seq.token_ids += [5, 6]
    assert drafter.propose(seq, 64) == [7, 8]
    seq.token_ids += [9]
    assert drafter.propose(seq, 64) == []
    seq.token_ids += [8, 9]
    assert drafter.propose(seq, 64) == []


def test_a_sequence_that_another_worker_began_continues_the_beginning() -> None:
    drafter = build_drafter("grammar", new_parts())
    assert drafter.propose(new_sequence([1, 2], [5], forced=[5, 6, 7]), 64) == [6, 7]
    assert drafter.propose(new_sequence([1, 2], [6], forced=[5, 6, 7]), 64) == []


def test_without_a_grammar_nothing_is_proposed() -> None:
    assert build_drafter("grammar", new_parts()).propose(new_sequence([1, 2]), 64) == []


def test_the_step_after_the_prompt_verifies_what_follows_the_token_that_is_not_known_yet() -> None:
    drafting = TapeDrafting({"grammar": build_drafter("grammar", new_parts())}, DraftCounts())
    seq = new_sequence([1, 2], forced=[5, 6, 7, 8])
    seq.num_pending = 1  # the prompt is in flight
    assert drafting.plan([seq], 100, StepCosts()) == {seq: 3}
    assert seq.tape is not None
    assert (seq.tape.start, seq.tape.token_ids, seq.tape.source) == (2, [5, 6, 7, 8], "grammar")
