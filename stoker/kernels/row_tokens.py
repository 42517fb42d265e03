"""What the device knows about the tokens of each row, as one table of integers.

With drafts, the number of tokens that a step adds is known on the device first. So the device keeps each row's length and
its last tokens, and takes drafts from the row's tape by itself, or else those that a draft model left there.

row_tokens [rows, COLUMNS]: the number of known tokens, the limit of that number, the position of the tape's first guess,
the position of the draft model's first guess, then the last WINDOW known tokens (the one at position p is in column
RECENT + p % WINDOW), then the tape's guesses (see sched/draft_tape.py), then the draft model's, which are valid as long as
their first position is the number of known tokens, then the prompt's token after the part that a step computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WINDOW = 64  # known tokens that a tape can be compared with, and guesses of a tape
MODEL_DRAFTS = 16  # guesses of a draft model
LENGTH, LIMIT, TAPE_START, MODEL_START, RECENT, TAPE = 0, 1, 2, 3, 4, 4 + WINDOW
MODEL = TAPE + WINDOW
NEXT = MODEL + MODEL_DRAFTS
COLUMNS = NEXT + 1
NO_GUESS = -(1 << 62)


def new_row_tokens(num_rows: int, device: torch.device) -> Tensor:
    return torch.zeros(num_rows, COLUMNS, dtype=torch.int64, device=device)


def pack_row(token_ids: Sequence[int], limit: int) -> list[int]:
    """Return the table's row for a sequence with these known tokens and no guesses."""
    length = len(token_ids)
    recent = [0] * WINDOW
    for position in range(max(0, length - WINDOW), length):
        recent[position % WINDOW] = token_ids[position]
    return [length, limit, 0, 0, *recent, *pack_guesses([]), *[NO_GUESS] * MODEL_DRAFTS, 0]


def pack_guesses(token_ids: Sequence[int]) -> list[int]:
    """Return a tape's guesses with padding."""
    assert len(token_ids) <= WINDOW, f"a tape of {len(token_ids)} guesses"
    return [*token_ids, *[NO_GUESS] * (WINDOW - len(token_ids))]
