"""Parts that the answers of several endpoints have: usage and logprobs."""

from __future__ import annotations

import math

import msgspec
from msgspec import UNSET, UnsetType

_LOWEST_LOGPROB = -9999.0  # stands for -inf, which JSON does not have


def finite_logprob(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """The two counts of predictions are present if the request has a `prediction`."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class UsageReport(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]
