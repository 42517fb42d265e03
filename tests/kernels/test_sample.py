"""Sampling: the right distribution, the usual definitions of the filters, and randomness as a function."""

from __future__ import annotations

import pytest
import torch

from stoker.kernels.sample import mask_tokens, penalise, sample_tokens, uniform


def uniforms(count: int, seed: int = 3) -> torch.Tensor:
    return uniform(torch.full((count,), seed), torch.arange(count))


def sample_many(
    logits: torch.Tensor, count: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    rows = logits.expand(count, -1)
    full = torch.full((count,), 1.0)
    return sample_tokens(
        rows, full * temperature, torch.full((count,), top_k), full * top_p, full * min_p, uniforms(count)
    )


def naive_probs(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Temperature, then top_k, then top_p over the rest, then min_p, one token at a time."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = probs.argsort(descending=True).tolist()
    kept = order[: top_k or len(order)]
    mass, chosen = 0.0, []
    total = sum(float(probs[i]) for i in kept)
    for i in kept:
        if chosen and mass >= top_p * total:
            break
        chosen.append(i)
        mass += float(probs[i])
    chosen = [i for i in chosen if probs[i] >= min_p * probs.max()]
    result = torch.zeros_like(probs)
    result[chosen] = probs[chosen]
    return result / result.sum()


@pytest.mark.parametrize("vocab", [2, 7, 50, 1500])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1, 0, 1, 0),
        (0.5, 0, 1, 0),
        (2, 5, 1, 0),
        (1, 0, 0.7, 0),
        (1, 3, 0.8, 0),
        (1, 0, 1, 0.1),
        (1.3, 40, 0.95, 0.02),
        (1, 1, 1, 0),
    ],
)
def test_samples_follow_the_filtered_distribution(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    expected = naive_probs(logits, temperature, top_k, top_p, min_p)
    count = 20_000
    found = sample_many(logits, count, temperature, top_k, top_p, min_p).bincount(minlength=vocab) / count
    assert set(found.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())
    # Five standard deviations of a count, plus some slack, since 1,500 counts are checked.
    slack = 5 * (expected * (1 - expected) / count).sqrt() + 1e-4
    assert ((found - expected).abs() <= slack).all()


def test_a_top_p_that_needs_more_than_the_first_sorted_tokens_takes_them() -> None:
    logits = torch.zeros(3000)  # flat: 0.9 of the mass is 2,700 tokens, or all of them where equal tokens stay together
    found = sample_many(logits, 20_000, 1.0, 0, 0.9, 0.0)
    assert len(found.unique()) > 2690


def test_uniform_is_a_function_of_seed_and_position_and_fills_the_interval() -> None:
    values = uniforms(100_000)
    assert torch.equal(values, uniforms(100_000))
    assert 0 <= values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1
    assert abs(float(values.mean()) - 0.5) < 0.005
    counts = values.histc(bins=100, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 170  # chi square, 99 degrees of freedom
    neighbours = torch.stack([values[:-1], values[1:]])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 0.01
    other = uniforms(100_000, seed=4)
    assert abs(float(torch.corrcoef(torch.stack([values, other]))[0, 1])) < 0.01


def test_a_row_samples_the_same_token_in_any_batch() -> None:
    logits = torch.randn(64, 300)
    full = torch.ones(64)
    arguments = (full * 0.9, torch.arange(64) % 5 * 10, full - 0.1 * (torch.arange(64) % 3), full * 0.01, uniforms(64))
    whole = sample_tokens(logits, *arguments)
    for i in range(64):
        assert sample_tokens(logits[i : i + 1], *(argument[i : i + 1] for argument in arguments)) == whole[i]


def test_extreme_uniforms_never_sample_a_token_without_mass() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")]])
    ones, zeros = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    for value in (0.0, 1 - 2**-53):
        sampled = sample_tokens(logits, ones, zeros, ones, torch.zeros(1), torch.tensor([value], dtype=torch.float64))
        assert sampled.item() in (1, 3)


def test_penalties_are_openais_and_repetition_counts_the_prompt() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 3.0]])
    counts = torch.tensor([[2, 1, 0, 0]])
    in_prompt = torch.tensor([[False, False, True, False]])
    one = torch.ones(1)
    found = penalise(logits, counts, in_prompt, one * 2, one * 0.5, one * 0.25)
    assert found.tolist() == [[1.0 - 1.0 - 0.25, -4.0 - 0.5 - 0.25, 0.5, 3.0]]


def test_a_mask_allows_exactly_its_bits() -> None:
    logits = torch.zeros(2, 70)
    allowed = torch.zeros(2, 3, dtype=torch.int32)
    for row, token in [(0, 0), (0, 31), (0, 32), (1, 69), (1, 63)]:
        bit = 1 << (token % 32)
        allowed[row, token // 32] |= bit - (1 << 32) if bit >= 1 << 31 else bit
    found = mask_tokens(logits, allowed).isfinite()
    assert found[0].nonzero().flatten().tolist() == [0, 31, 32]
    assert found[1].nonzero().flatten().tolist() == [63, 69]
