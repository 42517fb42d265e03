"""The contract of what follows the input of a custom tool call, and what its implementations share.

A client's grammar describes a text. How the model writes the text depends on the tool format: inside a JSON string
(string_vocabulary.py), or as it is, up to a mark (marked_vocabulary.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import llguidance
import numpy as np

Mask = np.ndarray[Any, Any]  # [ceil(vocab / 32)] int32, one bit per token


class InputText(Protocol):
    """Follows one input, token by token."""

    @property
    def broken(self) -> bool:
        """True if the grammar reached one of its limits. Then it cannot continue."""

    @property
    def rest(self) -> bytes | None:
        """The text of the last token behind the mark that ends the input. None: the input has not ended."""

    def accept(self, token_id: int) -> bool:
        """Read a token. Returns False if the grammar does not allow it."""

    def allowed(self) -> Mask:
        """Return the tokens that may come next, among them those that end the input."""

    def forced(self) -> list[int]:
        """Return tokens of the text that must come next. Often there is none."""

    def ending(self) -> list[int] | None:
        """Return tokens of a short text that completes this one, or None if none was found."""


class InputVocabulary(Protocol):
    """What the inputs of one tool format share: how tokens stand for texts. It is made once."""

    tokenizer: llguidance.LLTokenizer  # of the texts that tokens stand for; the first ones are the 256 bytes
    byte_tokenizer: llguidance.LLTokenizer  # of one byte each, to search for endings

    def check(self) -> None:
        """Raise InvalidRequest if the vocabulary cannot write inputs."""

    def crossing(self, rest: bytes) -> Mask:
        """Return the tokens that write `rest`, an end of the text that opens the input, and something of the input."""

    def follow(self, pieces: llguidance.LLMatcher, by_bytes: llguidance.LLMatcher) -> InputText:
        """Return what follows one input, with two matchers of its grammar: one for each of the tokenizers."""


class _LlVocabulary:
    """A vocabulary in the form that llguidance reads."""

    def __init__(self, tokens: list[bytes], stop_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = stop_id
        self.bos_token_id = None
        self.special_token_ids = [stop_id]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)  # the first tokens are the 256 bytes


def ll_tokenizer(pieces: Iterable[bytes]) -> llguidance.LLTokenizer:
    """Return a tokenizer of texts, which begin with the 256 bytes. The token after the last one ends a text."""
    tokens = [*pieces, b""]
    stop_id = len(tokens) - 1
    wrapper = llguidance.TokenizerWrapper(_LlVocabulary(tokens, stop_id))
    return llguidance.LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=stop_id, slices=[])


def crossings(vocabulary: Sequence[bytes], opening: bytes, vocab_size: int) -> dict[bytes, Mask]:
    """Return the tokens that cross the end of `opening`, for each rest of it."""
    found: dict[bytes, Mask] = {}
    for at in range(len(opening)):
        rest = opening[at:]
        crossing = [i for i, token in enumerate(vocabulary) if token.startswith(rest) and len(token) > len(rest)]
        found[rest] = mask_of(crossing, vocab_size)
    return found


def mask_of(token_ids: Sequence[int], vocab_size: int) -> Mask:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed_pieces(matcher: llguidance.LLMatcher, stop_piece: int, words: Mask) -> Mask:
    """Return 1 for each piece that may come next, else 0. `words` is memory for the bits of all pieces."""
    if matcher.is_stopped():  # no more text is possible
        words[:] = 0
    else:
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    bits[stop_piece] = 0  # the piece of tokens that stand for nothing
    return bits
