"""Continues an answer that another worker began: checks the field `resume`, which holds its tokens so far."""

from __future__ import annotations

import time
from dataclasses import dataclass

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.fields import GenerationFields
from stoker.proto.resume_notes import TokenWithLogprobs
from stoker.sched.request import TokenLogprobs
from stoker.worker.sampling import ModelLimits, check_token_ids


@dataclass(frozen=True, slots=True)
class Resumed:
    """The tokens of one choice so far."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finished: bool = False


_NOTHING = Resumed([], None)


def created_of(fields: GenerationFields) -> int:
    return int(time.time()) if fields.resume is None else fields.resume.created


def resumed_choices(
    fields: GenerationFields, num_choices: int, num_logprobs: int | None, limits: ModelLimits
) -> list[Resumed]:
    """Return one entry per choice. Entries are empty if the answer begins here."""
    if fields.resume is None:
        return [_NOTHING] * num_choices
    given = fields.resume.choices
    if len(given) != num_choices:
        raise InvalidRequest(
            f"Invalid 'resume.choices': {len(given)} entries were given, but the answer has {num_choices} choices.",
            param="resume.choices",
        )
    resumed = []
    for i, choice in enumerate(given):
        param = f"resume.choices[{i}].token_ids"
        logged = [token for token in choice.token_ids if not isinstance(token, int)]
        ids = [token if isinstance(token, int) else token.token_id for token in choice.token_ids]
        if num_logprobs is not None and len(logged) != len(ids):
            raise InvalidRequest(
                f"Invalid '{param}': with logprobs, each token must be [id, logprob, top ids, top logprobs].",
                param=param,
            )
        logprobs = None if num_logprobs is None else [_logprobs(token) for token in logged]
        resumed.append(Resumed(check_token_ids(ids, param, limits), logprobs, choice.finished))
    return resumed


def _logprobs(token: TokenWithLogprobs) -> TokenLogprobs:
    if len(token.top_ids) != len(token.top_logprobs):
        raise InvalidRequest(
            f"Invalid 'resume.choices': token {token.token_id} has {len(token.top_ids)} top ids, but "
            f"{len(token.top_logprobs)} top logprobs.",
            param="resume.choices",
        )
    return TokenLogprobs(token.token_id, token.logprob, token.top_ids, token.top_logprobs)
