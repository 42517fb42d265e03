"""Samples tokens from logits.  logits [rows, vocab], float32 -> token ids [rows]

Randomness is a function: `noise(seed, position, token id)` decides the sampled token, whatever the batch, the schedule or
the worker. Each token id has an exponentially distributed random number, and the token with the largest quotient of weight
and number is sampled (the Gumbel-max trick without logarithms of weights). So two models that share the noise often sample
the same token, which a draft model needs, and the maximum can be taken over parts of the vocabulary. Filters are thresholds
on probability, so that the order of equal values does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_NOISE = 1e-300  # instead of zero, by which no weight can be divided
# This many of the most likely tokens are sorted first; the whole vocabulary only if these do not reach top_p.
_FIRST_SORTED = 512


def noise_keys(seed: Tensor, position: Tensor) -> Tensor:
    """Return a random integer per row. seed and position are [rows] int64. Two rounds of a 64-bit mixer; torch's integers
    wrap around."""
    return _mix(_mix(seed) + position * -7046029254386353131)


def noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return an exponentially distributed random number in float64 for each pair of a row's key and a token id. The shapes
    are broadcast."""
    mixed = _mix(keys + token_ids * -7046029254386353131)
    uniforms = (((mixed >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
    return (1.0 - uniforms).log_().neg_().clamp_(min=_LEAST_NOISE)


def _mix(x: Tensor) -> Tensor:
    def down(value: Tensor, bits: int) -> Tensor:
        return (value >> bits) & ((1 << (64 - bits)) - 1)

    x = (x ^ down(x, 30)) * -4658895280553007687
    x = (x ^ down(x, 27)) * -7723592293110705685
    return x ^ down(x, 31)


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """Sample one token per row. temperature [rows] > 0; top_k 0, top_p 1 and min_p 0 keep all tokens. keys [rows] are from
    `noise_keys`."""
    scaled = logits / temperature[:, None]
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()  # the largest weight is 1
    if bool((top_k > 0).any() | (top_p < 1).any() | (min_p > 0).any()):
        weights = torch.where(weights < _threshold(weights, top_k, top_p, min_p)[:, None], 0.0, weights)
        # Most tokens are cut. Noise for the others alone is faster.
        rows, token_ids = weights.nonzero(as_tuple=True)
        scores = torch.zeros_like(weights, dtype=torch.float64)
        scores[rows, token_ids] = weights[rows, token_ids].double() / noise(keys[rows], token_ids)
        return scores.argmax(-1)
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    return (weights.double() / noise(keys[:, None], token_ids)).argmax(-1)


def _threshold(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the smallest weight that is kept: the larger of min_p times the largest weight, and the last weight within
    top_k and top_p."""
    vocab = weights.shape[1]
    num_sorted = min(vocab, max(_FIRST_SORTED, int(top_k.max())))
    ranked = weights.topk(num_sorted, -1).values
    limit = torch.where(top_k > 0, top_k, vocab)
    whole = weights.sum(-1, dtype=torch.float64)
    short = (limit > num_sorted) & (top_p < 1) & (ranked.sum(-1, dtype=torch.float64) < top_p * whole)
    if bool(short.any()):
        ranked = weights.sort(-1, descending=True).values
    inside = torch.arange(ranked.shape[1], device=weights.device)[None, :] < limit[:, None]
    kept = torch.where(inside, ranked, 0.0).double()
    # A row without top_k counts all of its mass, also what was not sorted.
    total = torch.where(limit < vocab, kept.sum(-1), whole)
    before = kept.cumsum(-1) - kept
    keep = inside & (before < (top_p * total)[:, None])
    keep[:, 0] = True
    last = torch.where(keep, ranked, torch.inf).min(-1).values
    # Only top_k and top_p can cut below what was sorted: without either, everything is kept.
    last = torch.where((limit >= vocab) & (top_p >= 1), 0.0, last)
    return torch.maximum(last, min_p * ranked[:, 0])


def penalise(
    logits: Tensor, output_counts: Tensor, in_prompt: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Apply penalties. output_counts [rows, vocab]; in_prompt [rows, vocab] bool; the penalties [rows]. Repetition
    counts the prompt too."""
    seen = in_prompt | (output_counts > 0)
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * output_counts - presence[:, None] * (output_counts > 0)


def mask_tokens(logits: Tensor, allowed: Tensor) -> Tensor:
    """Set the logits of disallowed tokens to -inf. allowed [rows, ceil(vocab / 32)] int32 has one bit per token, lowest
    first."""
    bits = torch.arange(32, device=logits.device, dtype=torch.int32)
    flags = ((allowed.to(logits.device)[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    if flags.shape[1] < logits.shape[1]:  # a padded vocabulary: tokens that the grammar does not know are disallowed
        flags = torch.nn.functional.pad(flags, (0, logits.shape[1] - flags.shape[1]))
    return logits.masked_fill(~flags, float("-inf"))
