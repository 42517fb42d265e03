"""The text that a client expects in the answer, as token ids for the engine.

A prediction saves time where it is right and never changes an answer, so a long one is cut and not refused.
"""

from __future__ import annotations

from stoker.proto.openai.prediction import PredictedOutput
from stoker.worker.context import WorkerContext

_SKIPPED_TOKENS = 1024  # of the prediction that the answer may leave out, beyond the longest possible answer
_CHARS_PER_TOKEN = 16  # a longer text is cut before it is tokenized


async def predicted_tokens(
    context: WorkerContext, prediction: PredictedOutput | None, max_tokens: int | None
) -> tuple[int, ...]:
    """Return the tokens of the prediction, as many as an answer of `max_tokens` tokens may need. None: of any length."""
    if prediction is None:
        return ()
    longest = context.limits.max_model_tokens
    limit = (min(max_tokens, longest) if max_tokens is not None and max_tokens > 0 else longest) + _SKIPPED_TOKENS
    text = prediction.text[: _CHARS_PER_TOKEN * limit]
    token_ids = await context.off_loop(len(text), lambda: context.text.tokenizer.encode(text))
    return tuple(token_ids[:limit])
