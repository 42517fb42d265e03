"""Evaluation by real acceptance: held-out prompts through the engine, with the head as its drafter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stoker.base.config import EngineSettings
from stoker.engine.llm import LLM
from stoker.sched.draft_tape import MODEL_GUESSES
from stoker.sched.drafting import Drafting
from stoker.sched.request import SamplingParams
from stoker.sched.sequence import Sequence
from stoker.sched.step_costs import StepCosts
from stoker.spec.draft_counts import SourceCounts


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """How many drafts of a head the model accepted."""

    num_prompts: int
    generated_tokens: int
    drafted_at: list[int]  # verified drafts at positions 1, 2, ...
    accepted_at: list[int]
    acceptance_at: list[float]  # share of the drafts at each position that were accepted, with all before them
    tokens_per_step: float  # of steps that verify a draft at every position

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class EveryDraft:
    """Verifies every draft. In a server, the engine verifies fewer where that is faster, which depends on the machine."""

    def __init__(self, drafting: Drafting) -> None:
        self.uses_costs = False
        self._drafting = drafting

    @property
    def num_guesses(self) -> int:
        return self._drafting.num_guesses

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        return self._drafting.plan(seqs, budget, StepCosts())  # without costs, every draft pays

    def launched(self, seqs: Iterable[Sequence]) -> None:
        self._drafting.launched(seqs)

    def committed(self, seq: Sequence, num_drafts: int, token_ids: list[int]) -> None:
        self._drafting.committed(seq, num_drafts, token_ids)

    def dropped(self, seq: Sequence) -> None:
        self._drafting.dropped(seq)

    def suggested(self, seq: Sequence, token_ids: list[int]) -> None:
        self._drafting.suggested(seq, token_ids)

    def ended(self, seq: Sequence) -> None:
        self._drafting.ended(seq)


def measure_acceptance(
    folder: Path,
    settings: EngineSettings,
    head: Path,
    prompts: Items[Items[int]],
    samplings: Items[SamplingParams],
    answer_tokens: int,
) -> list[HeadAcceptance]:
    """Answer the prompts with this head as the only drafter, once with each sampling."""
    found = []
    with closing(LLM(folder, replace(settings, drafter=f"eagle3:{head}"), wrap_drafting=EveryDraft)) as llm:
        for sampling in samplings:
            llm.built.draft_counts.by_source.clear()
            outputs = llm.generate(prompts, sampling, answer_tokens)
            generated = sum(len(output.token_ids) for output in outputs)
            counts = llm.built.draft_counts.by_source.get("eagle3", SourceCounts())
            found.append(_acceptance(counts, len(prompts), generated))
    return found


def _acceptance(counts: SourceCounts, num_prompts: int, generated_tokens: int) -> HeadAcceptance:
    drafted, accepted = counts.drafted_at[:MODEL_GUESSES], counts.accepted_at[:MODEL_GUESSES]
    rates = [number / count if count else 0.0 for number, count in zip(accepted, drafted, strict=True)]
    shown = [round(rate, 4) for rate in rates]
    return HeadAcceptance(num_prompts, generated_tokens, drafted, accepted, shown, round(1 + sum(rates), 3))
