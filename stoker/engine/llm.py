"""LLM: the engine in this process, for scripts, tests and benchmarks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stoker.base.config import EngineSettings
from stoker.base.ids import RequestId
from stoker.engine.build import build_engine
from stoker.engine.grammar import Grammars
from stoker.kv.blocks.transfer import KvTicket
from stoker.sched.request import Finish, GenerateRequest, SamplingParams, TokenLogprobs, Usage

_LOOK_EVERY_S = 0.01


@dataclass(slots=True)
class LLMOutput:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage | None = None
    ticket: KvTicket | None = None


class LLM:
    def __init__(
        self,
        folder: Path | str,
        settings: EngineSettings | None = None,
        *,
        grammars: Grammars | None = None,
        random_weights_seed: int | None = None,
    ) -> None:
        self._bell = threading.Event()
        self.built = build_engine(
            Path(folder),
            settings or EngineSettings(),
            grammars=grammars,
            random_weights_seed=random_weights_seed,
            wake=self._bell.set,
        )
        self.built.engine.capture_all_graphs()
        self._number = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        max_new_tokens: int = 128,
        cache_salt: str = "",
    ) -> list[LLMOutput]:
        """All prompts at once; the answers in their order."""
        each = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else sampling
        requests = []
        for prompt, params in zip(prompts, each, strict=True):
            request_id = RequestId(f"llm-{self._number}")
            self._number += 1
            requests.append(
                GenerateRequest(request_id, list(prompt), len(prompt), params, max_new_tokens, cache_salt=cache_salt)
            )
        return self.run(requests)

    def run(self, requests: Sequence[GenerateRequest]) -> list[LLMOutput]:
        engine, store = self.built.engine, self.built.store
        completions = {request.request_id: LLMOutput() for request in requests}
        for request in requests:
            engine.add(request, store.num_worth_loading(request.token_ids, request.cache_salt))
        while engine.has_work:
            for chunk in engine.step():
                completion = completions[chunk.request_id]
                completion.token_ids += chunk.token_ids
                completion.logprobs += chunk.logprobs or []
                completion.finish = chunk.finish
                completion.usage = chunk.usage or completion.usage
                completion.ticket = chunk.ticket
            if engine.idle:
                self._bell.wait(_LOOK_EVERY_S)
                self._bell.clear()
        return list(completions.values())

    def close(self) -> None:
        self.built.close()
