"""Drafts from known answers, with random errors, as often and as many as the random numbers say."""

from __future__ import annotations

import random
from collections.abc import Mapping

from stoker.sched.draft_tape import MAX_DRAFTS, TAPE_TOKENS, DraftTape
from stoker.sched.drafting import NoDrafting
from stoker.sched.sequence import Sequence
from stoker.sched.step_costs import StepCosts


class KnownAnswers(NoDrafting):
    """`answers` are the tokens after the prompt, by request id. They may be longer than what is sampled."""

    def __init__(self, answers: Mapping[str, list[int]], vocab: int, rng: random.Random) -> None:
        self._answers = answers
        self._vocab = vocab
        self._rng = rng
        self._error_rate = rng.choice([0.0, 0.1, 0.3])
        self._rate = rng.choice([0.5, 0.9, 1.0])

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> dict[Sequence, int]:
        rng = self._rng
        wanted = {seq: rng.randint(1, MAX_DRAFTS) for seq in seqs if rng.random() < self._rate}
        for seq in wanted:
            if seq.tape is None or rng.random() < 0.5:
                seq.tape = self._tape(seq)
        return wanted

    def _tape(self, seq: Sequence) -> DraftTape:
        rng, start = self._rng, len(seq.token_ids)
        answer = self._answers.get(seq.request.request_id, [])[start - seq.request.num_prompt :]
        guesses = [*answer, *[rng.randrange(self._vocab) for _ in range(20)]][: rng.randint(0, TAPE_TOKENS)]
        for i, _ in enumerate(guesses):
            if rng.random() < self._error_rate:
                guesses[i] = rng.choice([rng.randrange(self._vocab), ~rng.randrange(self._vocab)])
        return DraftTape(start, guesses, "known answers")
