"""Sampling: the right distribution, the usual definitions of the filters, and randomness as a function."""

from __future__ import annotations

import pytest
import torch

from stoker.kernels.sample import mask_tokens, noise, noise_keys, penalise, sample_tokens


def some_keys(count: int, seed: int = 3) -> torch.Tensor:
    return noise_keys(torch.full((count,), seed), torch.arange(count))


def uniforms(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Map exponentially distributed noise to the interval from 0 to 1."""
    return 1 - torch.exp(-noise(keys, token_ids))


def sample_many(
    logits: torch.Tensor, count: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    rows = logits.expand(count, -1)
    full = torch.full((count,), 1.0)
    return sample_tokens(
        rows, full * temperature, torch.full((count,), top_k), full * top_p, full * min_p, some_keys(count)
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
    count = 10_000
    found = sample_many(logits, count, temperature, top_k, top_p, min_p).bincount(minlength=vocab) / count
    assert set(found.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())
    # Five standard deviations of a count, plus some slack, since 1,500 counts are checked.
    slack = 5 * (expected * (1 - expected) / count).sqrt() + 1e-4
    assert ((found - expected).abs() <= slack).all()


def test_a_top_p_that_needs_more_than_the_first_sorted_tokens_takes_them() -> None:
    logits = torch.zeros(1000)  # flat: 0.9 of the mass is 900 tokens, or all of them where equal tokens stay together
    found = sample_many(logits, 6_000, 1.0, 0, 0.9, 0.0)
    assert len(found.unique()) > 880


@pytest.mark.parametrize("over", ["positions", "token ids"])
def test_noise_is_a_function_and_exponentially_distributed(over: str) -> None:
    if over == "positions":
        values, other = (uniforms(some_keys(100_000, seed), torch.tensor(7)) for seed in (3, 4))
    else:
        values, other = (uniforms(key, torch.arange(100_000)) for key in some_keys(2))
    assert torch.equal(noise(some_keys(50), torch.arange(50)), noise(some_keys(50), torch.arange(50)))
    assert 0 <= values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1
    assert abs(float(values.mean()) - 0.5) < 0.005
    counts = values.histc(bins=100, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 170  # chi square, 99 degrees of freedom
    neighbours = torch.stack([values[:-1], values[1:]])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([values, other]))[0, 1])) < 0.01


def test_a_row_samples_the_same_token_in_any_batch() -> None:
    logits = torch.randn(64, 300)
    full = torch.ones(64)
    arguments = (full * 0.9, torch.arange(64) % 5 * 10, full - 0.1 * (torch.arange(64) % 3), full * 0.01, some_keys(64))
    whole = sample_tokens(logits, *arguments)
    for i in range(64):
        assert sample_tokens(logits[i : i + 1], *(argument[i : i + 1] for argument in arguments)) == whole[i]


def test_a_token_without_mass_is_never_sampled() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")])
    assert set(sample_many(logits, 10_000, 1.0, 0, 1.0, 0.0).tolist()) == {1, 3}


def test_two_models_that_share_the_noise_agree_more_often_than_chance() -> None:
    """A draft model samples with the noise of the model, so that it is right where their probabilities are similar."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(200, generator=generator)
    similar = logits + 0.3 * torch.randn(200, generator=generator)
    ours, theirs = (sample_many(one, 5000, 1.0, 0, 1.0, 0.0) for one in (logits, similar))
    overlap = torch.minimum(torch.softmax(logits, 0), torch.softmax(similar, 0)).sum()
    by_chance = (torch.softmax(logits, 0) * torch.softmax(similar, 0)).sum()
    agreed = float((ours == theirs).double().mean())
    assert by_chance < 0.05
    assert agreed > 0.8 * overlap


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
