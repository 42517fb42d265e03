"""The remembered keys of prompts are those that hashing the whole prompt gives."""

from __future__ import annotations

import random

import pytest

from stoker.kv.blocks.keys import block_keys, root_key
from stoker.sim import prompt_keys
from stoker.sim.prompt_keys import PromptKeys
from stoker.sim.workloads.workload import Segments, SimTurn

ROOT, BLOCK = root_key("test"), 16


def prompts(seed: int) -> list[Segments]:
    """Turns of several sessions in random order. Some have a system prompt, and some add one segment or three."""
    rng = random.Random(seed)
    sessions: list[Segments] = [((1, 40), (2, 7)), ((1, 40), (3, 64)), ((1, 40),), ((4, 5),), ((1, 16), (2, 16))]
    found: list[Segments] = []
    for _ in range(60):
        number = rng.randrange(len(sessions))
        found.append(sessions[number])
        new = tuple((rng.randrange(5, 9), rng.randrange(1, 50)) for _ in range(rng.choice((1, 2, 2, 2, 3))))
        sessions[number] += new
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("most", [3, 1000])
def test_keys_are_those_of_the_whole_prompt(seed: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_keys, "_MAX_PROMPTS", most)
    keys = PromptKeys(ROOT, BLOCK)
    for segments in prompts(seed):
        token_ids = SimTurn(segments, 1, 0).token_ids()
        assert keys.of(segments, token_ids) == block_keys(token_ids, ROOT, BLOCK)
        assert len(keys._known) <= most


def test_a_later_turn_hashes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(token_ids: list[int], *args: object) -> list[object]:
        hashed.append(len(token_ids))
        return block_keys(token_ids, *args)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(prompt_keys, "block_keys", counted)
    keys, said = PromptKeys(ROOT, BLOCK), ((1, 160), (2, 33))
    keys.of(said, SimTurn(said, 1, 0).token_ids())
    later = (*said, (3, 10), (4, 20))
    keys.of(later, SimTurn(later, 1, 0).token_ids())
    other = ((1, 160), (5, 50))
    keys.of(other, SimTurn(other, 1, 0).token_ids())
    assert hashed == [160, 33, (160 + 33) % BLOCK + 30, 50]
