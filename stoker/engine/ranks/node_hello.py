"""What a rank tells the head when it arrives from another node, and how the head compares it with its own.

Both sides are started by hand, with their own files and settings, so everything that must be the same is compared before
anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.base.fleet_key import is_loopback

_MAX_NAMED = 4  # settings that an error names


@dataclass(frozen=True, slots=True)
class NodeHello:
    """A rank of another node. `facts` are those of `rank_facts`."""

    node: int
    num_nodes: int
    rank: int
    facts: dict[str, str]

    def to_table(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> NodeHello:
        try:
            node, num_nodes, rank = (int(table[name]) for name in ("node", "num_nodes", "rank"))
            return cls(node, num_nodes, rank, {str(name): str(fact) for name, fact in table["facts"].items()})
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ConfigError(
                f"a greeting that cannot be read: {error!r}; use the same version on all nodes"
            ) from error


def check_hello(hello: NodeHello, settings: EngineSettings, facts: Mapping[str, str]) -> None:
    """Raise ConfigError if a node does not fit the head, whose `settings` and `facts` are given."""
    nodes, each = settings.nodes, settings.ranks_per_node
    if hello.num_nodes != nodes.count:
        raise ConfigError(
            f"node {hello.node} was started with --nodes {hello.num_nodes}, and node 0 with --nodes {nodes.count}; give all nodes "
            "the same number"
        )
    differing = [name for name in sorted(facts) if hello.facts.get(name) != facts[name]]
    if differing:
        described = "; ".join(_describe(name, facts[name], hello.facts.get(name, "")) for name in differing)
        raise ConfigError(
            f"node {hello.node} differs from node 0 in {', '.join(differing)}: {described}. Start all nodes with the same "
            "files, version and settings"
        )
    if not 0 < hello.node < nodes.count or hello.rank // each != hello.node:
        raise ConfigError(f"rank {hello.rank} came from node {hello.node}, which has no such rank")


def check_key(settings: EngineSettings, host: str) -> None:
    """Raise ConfigError if strangers could send plans to the ranks of other nodes."""
    if settings.nodes.key is None and not settings.nodes.insecure and not is_loopback(host):
        raise ConfigError(
            f"--head {settings.nodes.head} without --secret-file: everyone who reaches this machine could join the engine. Give "
            "all nodes the same --secret-file, or accept this with --insecure"
        )


def key_bytes(settings: EngineSettings) -> bytes:
    return bytes.fromhex(settings.nodes.key or "")


def _describe(name: str, own: str, other: str) -> str:
    """Say how a fact differs. Settings are JSON tables, of which the differing entries are named."""
    if name != "settings":
        return f"{name} is {other or 'missing'} there, and {own} on node 0"
    try:
        mine, theirs = _flat(json.loads(own)), _flat(json.loads(other))
    except ValueError:
        return "its settings cannot be read"
    keys = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
    named = [f"{key} is {theirs.get(key)!r} there, and {mine.get(key)!r} on node 0" for key in keys[:_MAX_NAMED]]
    return ", ".join(named) + (f", and {len(keys) - _MAX_NAMED} more" if len(keys) > _MAX_NAMED else "")


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[before + name] = value
    return flat
