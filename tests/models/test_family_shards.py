"""A model that is split over ranks: the parts add up to the model, for every family and every layout it can have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import SHAPES, config_of, make_tiny

from stoker.base.errors import ConfigError, ModelFilesError
from stoker.models.family import ModelFamily, family_of
from stoker.models.weights import load
from stoker.parallel.shard import RankLayout, Shard, shards_of

LAYOUTS = [RankLayout(tp=2), RankLayout(tp=2, ep=2), RankLayout(pp=2), RankLayout(tp=2, pp=2, ep=2)]


def parts_of(family: ModelFamily, layout: RankLayout) -> list[tuple[Shard, ModelFamily]]:
    shards = shards_of(layout, [1] * family.shape.num_layers)
    return [(shard, family.sharded(shard)) for shard in shards]


@pytest.mark.parametrize("name", SHAPES)
def test_the_ranks_of_a_layout_load_every_value_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, name)
    family = family_of(config_of(name), "config.json")
    stored = load_file(tmp_path / "model.safetensors")
    wanted = {rule.source for rule in family.rules}
    tried = 0
    for layout in LAYOUTS:
        try:
            parts = parts_of(family, layout)
        except ConfigError:
            continue
        tried += 1
        taken = dict.fromkeys(wanted, 0)
        for _shard, part in parts:
            model = part.build(64)
            load(model, part.rules, part.ignored, tmp_path, lambda done, total: None)
            for rule in part.rules:
                cut = rule.cut
                count = stored[rule.source].numel()
                taken[rule.source] += count if cut is None else count // stored[rule.source].shape[cut.axis] * cut.count
        assert all(taken[source] >= stored[source].numel() for source in wanted), str(layout)
    assert tried >= 1, "every model can at least be split into stages"


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_hold_fewer_bytes_than_the_model(name: str) -> None:
    family = family_of(config_of(name), "config.json")

    def num_bytes(part: ModelFamily) -> int:
        with torch.device("meta"):
            return sum(parameter.nbytes for _, parameter in part.build(64).named_parameters())

    whole = num_bytes(family)
    for layout in LAYOUTS:
        try:
            sizes = [num_bytes(part) for _, part in parts_of(family, layout)]
        except ConfigError:
            continue
        assert max(sizes) < whole <= sum(sizes), str(layout)


@pytest.mark.parametrize("name", ["llama", "deepseek", "gpt-oss"])
def test_a_rank_refuses_a_tensor_that_one_process_refuses(name: str, tmp_path: Path) -> None:
    """A rank reads only a part of a tensor. A tensor of another size has other values there."""
    make_tiny(tmp_path, name)
    family = family_of(config_of(name), "config.json")
    right = load_file(tmp_path / "model.safetensors")
    parts = parts_of(family, RankLayout(2, 1, 2 if name == "gpt-oss" else 1))
    cuts = {rule.source.rpartition("layers.1.")[2]: rule for _, part in parts for rule in part.rules if rule.cut}
    for rule in cuts.values():
        assert rule.cut is not None
        value = right[rule.source]
        longer = torch.cat([value, value.narrow(rule.cut.axis, 0, 1)], rule.cut.axis)
        save_file({**right, rule.source: longer}, tmp_path / "model.safetensors")
        for _, part in parts:
            with pytest.raises(ModelFilesError, match=r"config\.json requires"):
                load(part.build(64), part.rules, part.ignored, tmp_path, lambda done, total: None)
