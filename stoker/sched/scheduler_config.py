"""SchedulerConfig and Counters: what a scheduler is given, and what it counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.sched.leases import LeaseTerms


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a scheduler."""

    block_tokens: int
    step_tokens: int  # maximum number of tokens that one step computes, over all sequences
    max_rows: int  # maximum number of sequences that run at a time
    fingerprint: str = ""  # hash of model, tokenizer, KV layout and dtype; the root of all block keys
    lease: LeaseTerms | None = None  # None: hold no KV for other workers
    max_offers: int = 0  # maximum number of blocks of a KV set that are being copied to the store at a time
    target_itl_s: float = math.inf  # goal for the time between tokens, which limits mixed steps; infinity: no goal
    vocab_size: int | None = None  # None: accept any token id
    max_tokens: int | None = None  # limit of one sequence, prompt included; None: limited by the KV cache only
    # Stages of the pipeline that executes the plans. With several, a sequence is not planned again before its sampled token
    # is known, and each plan has its share of the sequences that decode.
    stages: int = 1
    max_heads: int | None = None  # maximum number of tokens of a step whose logits are computed; None: by `max_rows`
    flex_step_s: float = math.inf  # goal for the time of a step with flex sequences only; infinity: no goal


@dataclass(slots=True)
class Counters:
    """Totals since the start. prompt = cached + computed, except for prompts computed again after a preemption.

    The parts of a scheduler share one object. Each total is increased by one part only.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    partial_tokens: int = 0  # reused from a block that differs towards its end; not reported as cached
    computed_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0  # verified drafts; not among the computed tokens
    accepted_draft_tokens: int = 0
    draft_step_s: float = 0.0  # time of decode-only steps with drafts or guesses
    undrafted_s: float = 0.0  # the fitted time that their tokens would have taken without drafts
    preemptions: int = 0
    interrupted_steps: int = 0  # steps of flex sequences that were stopped for an interactive request
    loaded_tokens: int = 0  # tokens whose KV came from a tier
    pulled_tokens: int = 0  # tokens whose KV came from another worker
    failed_loads: int = 0  # loads that brought fewer blocks than requested
