"""Settings, requests and grammars for engines with several ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from stoker.base.config import EngineSettings, KvSettings, RankSettings, SchedSettings
from stoker.base.ids import RequestId
from stoker.engine.llm import LLM, LLMOutput
from stoker.sched.request import GenerateRequest, GrammarSpec, SamplingParams
from tests.tiny import SHAPE

VOCAB = SHAPE["vocab_size"]
# Sizes that two and four ranks can split.
CHANGES = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
# Changes to try for a family: with latent attention there are as many KV heads, and some families count their layers.
CANDIDATES = [CHANGES, {**CHANGES, "num_key_value_heads": 8}, {"num_attention_heads": 8, "num_key_value_heads": 4}, {}]
LAYOUTS = {
    "tp2": RankSettings(2, 1, 1),
    "pp2": RankSettings(1, 2, 1),
    "tp2 pp2": RankSettings(2, 2, 1),
    "ep2": RankSettings(2, 1, 2),
    "tp4": RankSettings(4, 1, 1),
    "tp4 ep2": RankSettings(4, 1, 2),
    "pp4": RankSettings(1, 4, 1),
    "tp2 cp2": RankSettings(2, 1, 1, 2),
    "tp2 pp2 cp2": RankSettings(2, 2, 1, 2),
    "tp4 cp2": RankSettings(4, 1, 1, 2),
    "tp4 ep2 cp4": RankSettings(4, 1, 2, 4),
}


def settings(
    ranks: RankSettings | None = None, num_blocks: int = 200, step_tokens: int = 24, drafter: str | None = None
) -> EngineSettings:
    return EngineSettings(
        dtype="float64",
        device="cpu",
        num_threads=1,
        drafter=drafter,
        kv=KvSettings(block_tokens=4, num_blocks=num_blocks),
        sched=SchedSettings(step_tokens=step_tokens, max_rows=6),
        ranks=ranks or RankSettings(),
    )


class ParityMatcher:
    """Allows tokens of one parity in turns, and forces the token 4 after every third one. Ends after 12 tokens."""

    too_slow = False

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens: list[int] = []
        for token_id in token_ids:
            self.accept(token_id)

    @property
    def done(self) -> bool:
        return len(self._tokens) >= 12

    def _is_forced(self, count: int) -> bool:
        return count % 4 == 3

    def accept(self, token_id: int) -> bool:
        count = len(self._tokens)
        allowed = token_id == 4 if self._is_forced(count) else token_id % 2 == count % 2
        if allowed:
            self._tokens.append(token_id)
        return allowed

    def fill(self, allowed: Tensor) -> None:
        count = len(self._tokens)
        words = [0] * len(allowed)
        for token_id in range(VOCAB):
            if token_id == 4 if self._is_forced(count) else token_id % 2 == count % 2:
                words[token_id // 32] |= 1 << (token_id % 32)
        for i, word in enumerate(words):
            allowed[i] = word - (1 << 32 if word >> 31 else 0)

    def forced(self, max_tokens: int) -> list[int]:
        return [4] if self._is_forced(len(self._tokens)) else []


class ParityGrammars:
    def prepare(self, spec: GrammarSpec) -> object:
        return None

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int) -> ParityMatcher:
        return ParityMatcher(token_ids)

    def forced_start(self, spec: GrammarSpec) -> Sequence[int]:
        return [2, 1, 2, 4]  # only the last one is forced


def requests(seed: int, count: int = 10) -> list[GenerateRequest]:
    """Requests of all kinds: shared heads, greedy and sampled, penalties, logprobs, grammars, repetitions, priorities."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(24)]
    found = []
    for number in range(count):
        num_prompt = rng.randint(1, 36)
        head = shared[: rng.randint(0, num_prompt)]
        token_ids = head + [rng.randrange(VOCAB) for _ in range(num_prompt - len(head))]
        if number % 3 == 0:  # something for n-gram drafters
            token_ids = (token_ids[:6] * 7)[: len(token_ids)]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            logit_bias={5: 1.5} if number % 4 == 1 else {},
            seed=rng.randrange(1 << 40),
            num_logprobs=rng.choice([None, None, 2]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), 2)),
            grammar=GrammarSpec("regex", "parity") if number % 5 == 2 else None,
        )
        found.append(
            GenerateRequest(
                RequestId(f"r{number}"),
                token_ids,
                num_prompt,
                sampling,
                rng.randint(4, 24),
                priority=rng.choice([0, 0, 1]),
            )
        )
    return found


def answers(llm: LLM, arrivals: Sequence[GenerateRequest], seed: int = 0, cancel: str | None = None) -> list[LLMOutput]:
    """Run requests that arrive at random steps, and cancel one of them in between."""
    rng, engine, pool = random.Random(seed), llm.built.engine, llm.built.pool
    waiting = list(arrivals)
    outputs = {request.request_id: LLMOutput() for request in arrivals}
    for step in range(5000):
        while waiting and (rng.random() < 0.4 or not engine.has_work):
            engine.add(waiting.pop(0))
        if step == 9 and cancel is not None:
            engine.cancel(RequestId(cancel))
        for chunk in engine.step():
            output = outputs[chunk.request_id]
            output.token_ids += chunk.token_ids
            output.logprobs += chunk.logprobs or []
            output.finish = chunk.finish or output.finish
        pool.check()
        if not waiting and not engine.has_work:
            break
    else:
        raise AssertionError("the engine does not finish")
    assert pool.num_free == pool.num_blocks
    return list(outputs.values())


def without_logprobs(arrivals: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    return [replace(one, sampling=replace(one.sampling, num_logprobs=None)) for one in arrivals]
