"""Which earlier turn a request is compared with: the quick search finds the turn that the full comparison finds."""

from __future__ import annotations

import random
from array import array

import pytest

from stoker.fleet.lost_blocks import LostBlocks
from stoker.gateway.doctor.turns import SentTurn, TurnMemory, _closest, _continued
from stoker.gateway.prefix.prompt_parts import PromptParts


def random_turn(rng: random.Random) -> SentTurn:
    """A turn of one of a few conversations that share their first messages."""
    seed = rng.randrange(3)
    messages = [1, *(number * 10 + (seed if number > 1 else 0) for number in range(rng.randrange(6)))]
    if rng.random() < 0.2:
        messages[rng.randrange(len(messages))] = 99
    if rng.random() < 0.1:
        messages = []
    parts = PromptParts(array("Q", rng.choice([[], [7], [7, 8]])), array("Q", messages), rng.random() < 0.1)
    salt = rng.choice(["a", "a", "b"])
    return SentTurn.of(salt, None, parts if rng.random() < 0.9 else None, [1, 2, 3], 10)


@pytest.mark.parametrize("seed", range(300))
def test_the_quick_search_finds_the_same_turn(seed: int) -> None:
    rng = random.Random(seed)
    candidates = [random_turn(rng) for _ in range(rng.randrange(8))]
    turn = random_turn(rng)
    full, quick = _closest(candidates, turn, [1, 2, 3]), _continued(candidates, turn)
    has_messages = full is not None and full.earlier.parts is not None and len(full.earlier.parts.messages) > 0
    if full is not None and full.relation == "continued" and has_messages and turn.parts and turn.parts.messages:
        assert quick is not None
        assert quick.relation == "continued"
        assert quick.earlier is full.earlier
    else:
        assert quick is None


@pytest.mark.parametrize("seed", range(100))
def test_a_turn_is_found_by_the_blocks_that_it_continues(seed: int) -> None:
    """The turn is one that is remembered, of the same tenant and model, and the latest one of its conversation."""
    rng = random.Random(seed)
    memory = TurnMemory(max_hashes=rng.choice([300, 100_000]))
    conversations = [[one * 1000] for one in range(12)]
    latest: dict[int, SentTurn] = {}
    for _ in range(100):
        one = rng.randrange(12)
        keys = conversations[one]
        tenant = "even" if one % 2 == 0 else "odd"
        found = memory.before(tenant, "m", keys)
        assert found is None or found is latest[one]
        if memory._max_hashes > 1000 and one in latest:
            assert found is latest[one]
        assert memory.before("other", "m", keys) is None
        assert memory.before(tenant, "other", keys) is None
        messages = array("Q", [7, *range(one * 1000, one * 1000 + len(keys))])  # all begin with the same message
        turn = SentTurn.of(None, None, PromptParts(array("Q"), messages), keys, len(keys))
        compared = memory.replace(tenant, "m", turn, keys, found)
        if found is not None:
            assert compared is not None
            assert (compared.relation, compared.earlier) == ("continued", found)
        latest[one] = turn
        conversations[one] = [*keys, *(keys[-1] + 1 + i for i in range(rng.randrange(1, 4)))]
        anchored = {id(turn) for turns in memory._anchored.values() for turn in turns}
        assert {id(turn) for _, _, turn in memory._ends.values()} <= anchored
        assert memory.num_hashes == sum(turn.size for turns in memory._anchored.values() for turn in turns)
    assert memory.num_hashes <= memory._max_hashes


def test_blocks_that_were_lost_together_are_one_entry() -> None:
    now_s = 0.0
    losses = LostBlocks(lambda: now_s)
    losses.note([1, 2, 3], "evicted")
    now_s = 5.0
    losses.note([4, 5], "restarted")
    now_s = 9.0
    losses.note([6], "left")

    def runs(keys: list[int], start: int, before_s: float) -> list[tuple[int, str]]:
        return [(end, loss.cause) for end, loss in losses.run_of(keys, start, before_s)]

    assert runs([0, 1, 2, 3, 4, 5, 6], 1, 9.0) == [(4, "evicted"), (6, "restarted"), (7, "left")]
    assert runs([0, 1, 2, 3, 4, 5, 6], 1, 8.0) == [(4, "evicted"), (6, "restarted")]
    assert runs([0, 1, 2, 3, 4, 5, 6], 2, 4.0) == [(4, "evicted")]
    assert runs([1, 9, 2], 0, 9.0) == [(1, "evicted")]
    assert runs([0, 1], 0, 9.0) == []
    assert runs([1], 1, 9.0) == []
