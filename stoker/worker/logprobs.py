"""Logprobs in OpenAI's two formats: the list of objects of chat, and the four lists of completions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from stoker.proto.openai.answers import TokenLogprob, TopLogprob, finite_logprob
from stoker.proto.openai.chat import ChoiceLogprobs
from stoker.proto.openai.completions import CompletionLogprobs
from stoker.sched.request import TokenLogprobs
from stoker.text.detokenizer import Detokenizer

TokenBytes = Callable[[int], bytes]


def chat_logprobs(entries: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> ChoiceLogprobs:
    return ChoiceLogprobs(content_logprobs(entries, token_bytes))


def content_logprobs(entries: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> list[TokenLogprob]:
    content = []
    for entry in entries:
        spelled = token_bytes(entry.token_id)
        top = [
            TopLogprob(token=_text(other), logprob=finite_logprob(logprob), bytes=list(other))
            for other, logprob in zip(map(token_bytes, entry.top_ids), entry.top_logprobs, strict=True)
        ]
        content.append(
            TokenLogprob(
                token=_text(spelled), logprob=finite_logprob(entry.logprob), bytes=list(spelled), top_logprobs=top
            )
        )
    return content


class TextOffsets:
    """Finds where each token of a choice starts in its text. Tokens that are parts of one character start where it does."""

    def __init__(self, detokenizer: Detokenizer, num_chars: int = 0) -> None:
        """`detokenizer` is the one of the choice, before its first token. `num_chars` of text stand before that token."""
        self._detokenizer = copy.copy(detokenizer)
        self._num_chars = num_chars

    def take(self, token_id: int) -> int:
        begins = self._num_chars
        self._num_chars += len(self._detokenizer.push(token_id))
        return begins


def completion_logprobs(
    entries: Sequence[TokenLogprobs], num_logprobs: int, offsets: TextOffsets, token_bytes: TokenBytes
) -> CompletionLogprobs:
    tokens = [_text(token_bytes(entry.token_id)) for entry in entries]
    tops: list[dict[str, float] | None] = []
    for token, entry in zip(tokens, entries, strict=True):
        top = {
            _text(token_bytes(id_)): finite_logprob(logprob)
            for id_, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        }
        top.setdefault(token, finite_logprob(entry.logprob))
        tops.append(top)
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[finite_logprob(entry.logprob) for entry in entries],
        top_logprobs=tops if num_logprobs else None,
        text_offset=[offsets.take(entry.token_id) for entry in entries],
    )


def with_prompt(
    prompt: Sequence[TokenLogprobs | None],
    token_ids: Sequence[int],
    answer: CompletionLogprobs | None,
    num_logprobs: int,
    offsets: TextOffsets,
    token_bytes: TokenBytes,
) -> CompletionLogprobs:
    """Return the logprobs of an echoed prompt and of the answer after it. The first token of a prompt has none."""
    first = _text(token_bytes(token_ids[0]))
    found = CompletionLogprobs(
        tokens=[first],
        token_logprobs=[None],
        top_logprobs=[None] if num_logprobs else None,
        text_offset=[offsets.take(token_ids[0])],
    )
    entries = [entry for entry in prompt if entry is not None]
    for part in (completion_logprobs(entries, num_logprobs, offsets, token_bytes), answer):
        if part is not None:
            found.tokens += part.tokens
            found.token_logprobs += part.token_logprobs
            found.text_offset += part.text_offset
            if found.top_logprobs is not None:
                found.top_logprobs += part.top_logprobs or []
    return found


def _text(spelled: bytes) -> str:
    return spelled.decode("utf-8", "replace")
