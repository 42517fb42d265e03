"""What Ray knows of the nodes of a cluster."""

from __future__ import annotations

from typing import Any


def own_address(ray: Any) -> str:
    """Return the address of the node that this process runs on.

    `ray.util.get_node_ip_address` returns that of the head in a process that connected by the head's address.
    """
    own = ray.get_runtime_context().get_node_id()
    return str(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own))
