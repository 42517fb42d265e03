"""A fleet whose prefill and decode workers would share no KV is announced with a warning."""

from __future__ import annotations

import tomllib

import pytest

from stoker.cli.serve_settings import serve_keys
from stoker.up.config import FleetConfig
from stoker.up.fleet_table import fleet_config
from stoker.up.machine import GIB, Machine
from stoker.up.pair_numerics import pair_words

WITHOUT_GPU = Machine(all_ram_bytes=96 * GIB, ram_bytes=64 * GIB, shared_bytes=8 * GIB, disk_bytes=500 * GIB)
WITH_GPU = Machine(96 * GIB, 64 * GIB, 8 * GIB, 500 * GIB, (80 * GIB, 80 * GIB))


def pair(prefill: str, decode: str) -> FleetConfig:
    text = f'[[workers]]\nrole = "prefill"\n{prefill}\n[[workers]]\nrole = "decode"\n{decode}'
    return fleet_config(tomllib.loads(text), serve_keys())


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ('drafter = "off"', 'drafter = "auto"'),
        ('drafter = "auto"', 'drafter = "off"'),
        ("", 'drafter = "auto"'),
        ("", 'numerics = "exact"'),
        ('drafter = "auto"\nnumerics = "fast"', 'drafter = "auto"'),
    ],
)
def test_a_drafter_on_one_side_only_is_named(prefill: str, decode: str) -> None:
    (line,) = pair_words(pair(prefill, decode), WITH_GPU)
    assert line.startswith("warning: the prefill workers of workers[0]")
    assert "workers[1]" in line
    assert "numerics=exact" in line
    assert "numerics=fast" in line


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("", ""),
        ('drafter = "ngram"', 'drafter = "auto"'),
        ('numerics = "exact"', 'drafter = "auto"'),
        ('drafter = "off"\nmodel = "a"', 'drafter = "auto"\nmodel = "b"\n[[gateway.worker]]'),
    ],
)
def test_pairs_that_share_kv_and_workers_of_other_models_are_not_named(prefill: str, decode: str) -> None:
    assert list(pair_words(pair(prefill, decode), WITH_GPU)) == []


def test_what_depends_on_the_model_is_not_named() -> None:
    """On a CPU, 8-bit weights have a drafter by default, and others have none."""
    assert list(pair_words(pair("", 'drafter = "auto"'), WITHOUT_GPU)) == []
    assert list(pair_words(pair('drafter = "off"', 'drafter = "auto"'), WITHOUT_GPU))


def test_unified_workers_need_no_partner() -> None:
    text = '[[workers]]\ndrafter = "off"\n[[workers]]\nname = "other"\ndrafter = "auto"'
    assert list(pair_words(fleet_config(tomllib.loads(text), serve_keys()), WITH_GPU)) == []
