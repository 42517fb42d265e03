"""Which part of a model a rank holds: complete, balanced, and refused where it cannot be split."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from typing import Any

import pytest
import torch

from bench.support.large_checkpoint import CONFIG
from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError, ModelFilesError
from stoker.engine.memory import resolve_on
from stoker.engine.ranks.place import layer_bytes
from stoker.models.family import MODELS, ModelFamily, Rule, family_of
from stoker.parallel.shard import Piece, RankLayout, Shard, shards_of, split_layers
from tests.parallel.rank_cases import CANDIDATES
from tests.tiny import SHAPE, SHAPES


def example(name: str) -> ModelFamily:
    """Return a family in sizes that ranks can split. Families have rules of their own for these."""
    architecture, changes = SHAPES[name]
    for more in CANDIDATES:
        with suppress(ModelFilesError):
            return family_of({"architectures": [architecture], **SHAPE, **changes, **more}, "config.json")
    pytest.skip("none of the sizes suits this family, or its config.json is nested")


def taken(rule: Rule, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a mask of the values that a rule takes of its tensor."""
    mask = torch.zeros(shape, dtype=torch.int32)
    part, cut = mask, rule.cut
    for one in () if cut is None else (cut.rows, cut):
        part = part if one is None else part.narrow(one.axis, one.first, one.count)
    part.fill_(1)
    return mask


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", [RankLayout(2, 1), RankLayout(1, 2), RankLayout(2, 2), RankLayout(4, 1, 2)])
def test_the_ranks_of_a_stage_take_every_value_once_or_all_of_them(name: str, layout: RankLayout) -> None:
    """Norms, routers and shared KV heads are on all ranks of a stage; everything else is on one."""
    whole = example(name)
    with torch.device("meta"):
        model = whole.build(16)
        parameters = dict(model.named_parameters())
        shapes = {}
        for rule in whole.rules:
            rows = parameters[rule.target].shape
            shapes[rule.source] = tuple(rows) if rule.count is None else (rule.count, *rows[1:])
    counts = {source: torch.zeros(shape, dtype=torch.int32) for source, shape in shapes.items()}
    num_layers = sum(name.endswith("attention_norm.weight") for name in parameters)
    for shard in shards_of(layout, [1] * num_layers):
        try:
            part = whole.sharded(shard)
        except ConfigError as refused:
            pytest.skip(refused.message)
        with torch.device("meta"):
            own = dict(part.build(16).named_parameters())
        filled = dict.fromkeys(own, 0)
        for rule in part.rules:
            mask = taken(rule, shapes[rule.source])
            counts[rule.source] += mask
            filled[rule.target] += int(mask.sum())
        assert filled == {name: parameter.numel() for name, parameter in own.items()}
    for source, count in counts.items():
        low, high = int(count.min()), int(count.max())
        assert low == high, source
        assert low in (1, layout.tp), source


def test_a_rank_of_a_large_model_has_rules_for_its_own_experts_only() -> None:
    whole = family_of(CONFIG, "config.json")
    parts = [whole.sharded(Shard(rank, 8, 8)) for rank in range(8)]
    rules = [{rule.source for rule in part.rules if ".experts." in rule.source} for part in parts]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(rules, 2))
    assert len(set().union(*rules)) == sum(".experts." in rule.source for rule in whole.rules)


def test_packed_words_and_scales_are_not_divided() -> None:
    config = {**CONFIG, "moe_intermediate_size": 96, "num_hidden_layers": 1, "num_experts": 8}
    family = family_of(config, "config.json")
    with pytest.raises(ConfigError, match="share a scale or a word"):
        family.sharded(Shard(1, 4))


@pytest.mark.parametrize("seed", range(20))
def test_stages_are_balanced_by_bytes(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 30) for _ in range(rng.randint(2, 9))]
    num_stages, ends = rng.randint(1, len(sizes)), rng.choice([0, 25])
    found = split_layers(sizes, num_stages, ends)
    assert [i for stage in found for i in stage] == list(range(len(sizes)))

    def largest(cuts: tuple[int, ...]) -> int:
        edges = [0, *cuts, len(sizes)]
        stages = [sum(sizes[a:b]) for a, b in itertools.pairwise(edges)]
        return max([stages[0] + ends, *stages[1:]])

    best = min(largest(cuts) for cuts in itertools.combinations(range(1, len(sizes)), num_stages - 1))
    assert largest(tuple(stage.start for stage in found[1:])) == best


@pytest.mark.parametrize(("tied", "device", "counted"), [(True, "cpu", 1), (False, "cpu", 1), (False, "cuda", 2)])
def test_an_embedding_counts_where_memory_is_short_and_not_where_time_is(tied: bool, device: str, counted: int) -> None:
    """`counted`: matrices of the vocabulary in the first stage. A GPU's memory holds both; looking up takes no time."""
    hf = {"architectures": ["LlamaForCausalLM"], **SHAPE, "tie_word_embeddings": tied}
    family = family_of(hf, "config.json")
    resolved = resolve_on(torch.device(device), EngineSettings(dtype="float32"), family.shape)
    _, ends = layer_bytes(family, resolved)
    hidden = SHAPE["hidden_size"]
    assert ends == 4 * hidden * (counted * SHAPE["vocab_size"] + 1), "and the last norm"


def test_the_vocabulary_is_split_without_gaps() -> None:
    parts = [Shard(rank, 3).vocabulary(199) for rank in range(3)]
    assert [token for part in parts for token in part] == list(range(199))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Piece(0, 4).size_of(6, "heads"), "heads 6 cannot be split into 4 equal parts; .*: 1, 2, 3, 6"),
        (
            lambda: Shard(0, 3).heads(6, 2),
            "num_key_value_heads 2 must be a multiple of the number of ranks, or divide it",
        ),
        (lambda: Shard(0, 4, 4).experts(6), "the number of experts 6 cannot be split into 4"),
        (lambda: RankLayout(4, 1, 3), "ep=3 does not divide tp=4"),
        (lambda: RankLayout(0), "each must be at least 1"),
        (lambda: split_layers([1, 1], 3), "pp=3: the model has only 2 layers; use --pp 2 or less"),
    ],
)
def test_what_does_not_divide_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_every_family_can_be_sharded() -> None:
    assert all(hasattr(MODELS.get(name), "sharded") for name in MODELS)
