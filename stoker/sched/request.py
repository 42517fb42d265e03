"""What is asked of an engine and what it answers, in token ids. Plain dataclasses: `proto` carries them across processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stoker.base.ids import RequestId
from stoker.kv.transfer import KvTicket

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "structural_tag"]
FinishReason = Literal["stop", "length", "handoff", "cancelled", "deadline", "error"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output must match. `text` is the schema, expression, grammar or structural tag itself (empty for json_object)."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Randomness is a function of (seed, position) alone."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    num_logprobs: int | None = None  # None: no logprobs; 0: of the drawn token alone; k: and of the k most likely
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence tokens among them, unless the client ignores those
    min_tokens: int = 0  # no stop token is drawn before so many
    grammar: GrammarSpec | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to be continued. `token_ids` may hold more than the prompt: then the answer goes on after them (resume)."""

    request_id: RequestId
    token_ids: list[int]
    num_prompt: int  # token_ids[num_prompt:] were sampled before: penalties, grammar and positions count them as output
    sampling: SamplingParams
    max_new_tokens: int  # counted from num_prompt
    cache_salt: str = ""
    priority: int = 0  # lower runs first
    deadline_s: float | None = None  # on the machine's monotonic clock
    lease_id: str | None = None  # end after one token; its KV is kept under this name, for whoever continues elsewhere
    ticket: KvTicket | None = None  # where the KV of the leading tokens can be pulled


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's own distribution (before temperature, penalties and masks)."""

    token_id: int
    logprob: float
    top_ids: list[int]  # most likely first
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop_token_id: int | None = None  # the token of stop_token_ids that ended it; it is the last of token_ids
    error_code: str | None = None
    error_message: str | None = None


@dataclass(slots=True)  # not frozen, though nobody changes it: one is made for every token, in a third of the time
class Usage:
    """`cached_tokens`: prompt tokens in whole blocks found in the cache, of any tier, when the sequence first ran.
    `pulled_tokens`: those that came from the worker that the ticket names; that worker has counted them."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    pulled_tokens: int = 0


@dataclass(slots=True)  # not frozen, though nobody changes it: one is made for every token, in a third of the time
class TokenChunk:
    """New tokens of one sequence. The last chunk has `finish`, always, also after an error."""

    request_id: RequestId
    token_ids: list[int]
    usage: Usage
    logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    ticket: KvTicket | None = None  # with the last chunk, if the KV is kept
