"""`stoker kv` lists and frees the shared memory of real host tiers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from stoker.cli.main import main
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.store.tiers.host.host_memory import host_stores, remove_host_store
from stoker.kv.store.tiers.host.host_tier import HostTier
from stoker.kv.store.tiers.tier import TierContext

LAYOUT = KvLayout.of(num_layers=1, num_heads=1, width=32, block_tokens=16, dtype="float32", dtype_bytes=4)

# A process that opens the store named by its argument, and is killed while it uses it.
KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import test_cli_kv
tier = test_cli_kv.open_tier(sys.argv[2])
os.kill(os.getpid(), 9)
"""


def open_tier(name: str) -> HostTier:
    return HostTier(8 * LAYOUT.block_bytes, TierContext("fingerprint", LAYOUT, lambda keys: None), name)


@pytest.fixture
def name() -> Iterator[str]:
    unique = f"test-cli-{os.getpid()}-{time.monotonic_ns()}"
    yield unique
    remove_host_store(unique)


def line_of(name: str, shown: str) -> str:
    return next(line for line in shown.splitlines() if line.startswith(name))


def test_a_store_that_a_killed_process_left_is_listed_and_freed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", KILLED, os.path.dirname(__file__), name]
    assert subprocess.run(command, timeout=120).returncode == -9
    assert main(["kv", "list"]) == 0
    shown = capsys.readouterr().out
    assert "unused" in line_of(name, shown)
    assert "GiB" in line_of(name, shown)
    assert main(["kv", "free", name]) == 0
    assert "Freed 0.00 GiB of RAM." in capsys.readouterr().out
    assert [one for one in host_stores() if one.name == name] == []


def test_a_store_in_use_is_freed_only_with_force(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tier = open_tier(name)
    try:
        assert main(["kv", "list"]) == 0
        assert "in use" in line_of(name, capsys.readouterr().out)
        assert main(["kv", "free", name]) == 2
        assert f"KV store {name!r} is in use: stop its workers first, or give --force" in capsys.readouterr().err
        assert [one.in_use for one in host_stores() if one.name == name] == [True]
        assert main(["kv", "free", "--force", name]) == 0
        assert [one for one in host_stores() if one.name == name] == []
    finally:
        tier.close()


def test_an_unknown_store_is_an_error_that_lists_the_known_ones(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tier = open_tier(name)
    tier.close()
    assert main(["kv", "free", "no-such-store"]) == 2
    said = capsys.readouterr().err
    assert "there is no KV store called 'no-such-store'" in said
    assert name in said
