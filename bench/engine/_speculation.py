"""The measuring part of `speculation`: prompts, grammars and sampling are the worker's own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.base.config import EngineSettings, SchedSettings
from stoker.base.errors import InvalidRequest
from stoker.engine.llm import LLM
from stoker.engine.model_identity import read_hf_config
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.models.family import family_of
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.decode import decode
from stoker.sched.request import GrammarSpec, SamplingParams
from stoker.text.conversation import Conversation
from stoker.text.openai_messages import template_messages
from stoker.text.tools import chat_tools
from stoker.worker.constraint import resolve_constraint
from stoker.worker.context import ModelText
from stoker.worker.prompts import render
from stoker.worker.sampling import ModelLimits
from stoker.worker.tool_constraint import answer_constraint

Prompt = tuple[list[int], GrammarSpec | None]


@dataclass(frozen=True)
class Measured:
    """One prompt set with one drafter."""

    answers: list[list[int]]
    tokens_per_step: float  # of a sequence, over the steps in which it decoded
    acceptance: float
    tokens_per_s: float


def measure(
    folder: Path,
    settings: EngineSettings,
    sets: Mapping[str, list[dict[str, Any]]],
    batch: int,
    temperature: float,
    max_tokens: int,
) -> dict[str, Measured]:
    """Run all prompt sets on one engine, `batch` requests at a time."""
    text = ModelText.from_folder(folder)
    vocab_size = family_of(read_hf_config(folder), str(folder)).shape.vocab_size
    grammars = XGrammars(text.tokenizer, vocab_size)
    settings = replace(settings, sched=SchedSettings(max_rows=max(batch, 8)))
    with closing(LLM(folder, settings, grammars=grammars)) as llm:
        limits = ModelLimits(vocab_size, llm.built.max_model_tokens, text.tokenizer.eos_token_ids)
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0), 4)  # warms up
        found = {}
        for name, bodies in sets.items():
            prompts = [prompt for body in bodies if (prompt := _prompt(text, limits, grammars, body)) is not None]
            if name == "repeated":
                _run(llm, prompts, limits, batch, temperature, max_tokens)
            found[name] = _run(llm, prompts, limits, batch, temperature, max_tokens)
    return found


def _prompt(text: ModelText, limits: ModelLimits, grammars: XGrammars, body: dict[str, Any]) -> Prompt | None:
    """Return the tokens and the grammar of a request, or None if its grammar is not supported."""
    request = decode(ChatRequest, json.dumps(body).encode())
    tools = chat_tools(request, max_tools=128)
    wanted = resolve_constraint(request, request.response_format)
    constraint = answer_constraint(text, wanted, tools, reasoning=None, starts_inside=False)
    if constraint is not None:
        try:
            grammars.prepare(constraint.grammar)
        except InvalidRequest:
            return None
    conversation = Conversation(template_messages(request.messages), tools, {})
    return render(text, conversation, limits).token_ids, None if constraint is None else constraint.grammar


def _run(
    llm: LLM, prompts: Sequence[Prompt], limits: ModelLimits, batch: int, temperature: float, max_tokens: int
) -> Measured:
    counters, answers, num_decoded, decode_rows = llm.built.scheduler.counters, [], 0, 0
    drafts, accepted = counters.draft_tokens, counters.accepted_draft_tokens
    started_s = time.perf_counter()
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        sampling = [
            SamplingParams(
                temperature=temperature, seed=first + i, grammar=spec, stop_token_ids=tuple(limits.eos_token_ids)
            )
            for i, (_, spec) in enumerate(group)
        ]
        done = llm.generate([token_ids for token_ids, _ in group], sampling, max_tokens)
        answers += [completion.token_ids for completion in done]
        # The first token comes with the prompt, and each step after that adds one token and its accepted drafts.
        for completion in done:
            assert completion.usage is not None
            num_decoded += len(completion.token_ids) - 1
            decode_rows += len(completion.token_ids) - 1 - completion.usage.accepted_draft_tokens
    passed_s = time.perf_counter() - started_s
    drafts, accepted = counters.draft_tokens - drafts, counters.accepted_draft_tokens - accepted
    return Measured(
        answers,
        num_decoded / max(1, decode_rows),
        accepted / max(1, drafts),
        sum(map(len, answers)) / passed_s,
    )
