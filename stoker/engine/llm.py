"""LLM: the engine in this process, for scripts, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stoker.base.config import EngineSettings
from stoker.base.ids import RequestId
from stoker.engine.build import build_engine
from stoker.engine.grammar import Grammars
from stoker.sched.request import Finish, GenerateRequest, SamplingParams, TokenLogprobs, Usage


@dataclass(slots=True)
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage | None = None


class LLM:
    def __init__(
        self,
        folder: Path | str,
        settings: EngineSettings | None = None,
        *,
        grammars: Grammars | None = None,
        random_weights_seed: int | None = None,
    ) -> None:
        self.built = build_engine(
            Path(folder), settings or EngineSettings(), grammars=grammars, random_weights_seed=random_weights_seed
        )
        self._number = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        max_new_tokens: int = 128,
        cache_salt: str = "",
    ) -> list[Completion]:
        """All prompts at once; the answers in their order."""
        each = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else sampling
        engine = self.built.engine
        completions: dict[str, Completion] = {}
        for prompt, params in zip(prompts, each, strict=True):
            request_id = RequestId(f"llm-{self._number}")
            self._number += 1
            completions[request_id] = Completion()
            engine.add(
                GenerateRequest(request_id, list(prompt), len(prompt), params, max_new_tokens, cache_salt=cache_salt)
            )
        while engine.has_work:
            for chunk in engine.step():
                completion = completions[chunk.request_id]
                completion.token_ids += chunk.token_ids
                completion.logprobs += chunk.logprobs or []
                completion.finish = chunk.finish
                completion.usage = chunk.usage
        return list(completions.values())
