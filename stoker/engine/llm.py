"""LLM: an engine inside the calling process, for scripts, tests and benchmarks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stoker.base.config import EngineSettings
from stoker.base.ids import RequestId
from stoker.engine.build import build_engine
from stoker.engine.grammar import Grammars
from stoker.engine.ranks.rank_host import RankHost
from stoker.kv.blocks.transfer import KvTicket
from stoker.sched.drafting import Drafting
from stoker.sched.request import Finish, GenerateRequest, SamplingParams, TokenLogprobs, TokenUsage

_POLL_EVERY_S = 0.01
_NO_ITL_GOAL_MS = 1e6  # limits no step


@dataclass(slots=True)
class LLMOutput:
    """The generated tokens of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    usage: TokenUsage | None = None
    ticket: KvTicket | None = None


class LLM:
    """A model folder, loaded and ready to generate."""

    def __init__(
        self,
        folder: Path | str,
        settings: EngineSettings | None = None,
        *,
        grammars: Grammars | None = None,
        random_weights_seed: int | None = None,
        wrap_drafting: Callable[[Drafting], Drafting] = lambda drafting: drafting,
        ranks: RankHost | None = None,
    ) -> None:
        self._wake = threading.Event()
        self.built = build_engine(
            Path(folder),
            _without_itl_goal(settings or EngineSettings()),
            grammars=grammars,
            random_weights_seed=random_weights_seed,
            wake=self._wake.set,
            wrap_drafting=wrap_drafting,
            ranks=ranks,
        )
        self.built.engine.capture_all_graphs()
        self._num_requests = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        max_new_tokens: int = 128,
        cache_salt: str = "",
    ) -> list[LLMOutput]:
        """Generate for all prompts in one batch. The outputs are in the order of the prompts."""
        per_prompt = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else sampling
        requests = []
        for prompt, params in zip(prompts, per_prompt, strict=True):
            request_id = RequestId(f"llm-{self._num_requests}")
            self._num_requests += 1
            requests.append(
                GenerateRequest(request_id, list(prompt), len(prompt), params, max_new_tokens, cache_salt=cache_salt)
            )
        return self.run(requests)

    def run(self, requests: Sequence[GenerateRequest]) -> list[LLMOutput]:
        """Run the requests in one batch. Return their outputs in the same order."""
        engine, store = self.built.engine, self.built.store
        outputs = {request.request_id: LLMOutput() for request in requests}
        for request in requests:
            engine.add(request, store.num_worth_loading(request.token_ids, request.cache_salt))
        while engine.has_work:
            for chunk in engine.step():
                output = outputs[chunk.request_id]
                output.token_ids += chunk.token_ids
                output.logprobs += chunk.logprobs or []
                output.finish = chunk.finish
                output.usage = chunk.usage or output.usage
                output.ticket = chunk.ticket
            if engine.idle:
                self._wake.wait(_POLL_EVERY_S)
                self._wake.clear()
        return list(outputs.values())

    def close(self) -> None:
        self.built.close()


def _without_itl_goal(settings: EngineSettings) -> EngineSettings:
    """Leave the time between tokens open, unless it is set: `run` returns whole answers, so only throughput counts."""
    if settings.sched.target_itl_ms is not None:
        return settings
    return replace(settings, sched=replace(settings.sched, target_itl_ms=_NO_ITL_GOAL_MS))
