"""`stoker serve` on a node that is not the head: its ranks compute for the worker on node 0, and it serves no API."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

from stoker.base.fleet_key import read_fleet_secret
from stoker.base.output import print_message
from stoker.cli.serve_settings import ServeSettings, for_network
from stoker.cli.serving import EXIT_INTERRUPTED, Signals, progress_line


async def serve_node(model: str | None, settings: ServeSettings) -> int:
    """Run the ranks of this node until the head stops or a signal comes."""
    from stoker.checkpoint.source import default_cache_dir, resolve_model
    from stoker.engine.ranks.node_supervisor import NodeModel, NodeSupervisor

    server, membership = settings.server, settings.membership
    secret = read_fleet_secret(membership.secret_file, "--secret-file")
    cache_dir = server.cache_dir or default_cache_dir(os.environ)
    signals = Signals()
    resolving = asyncio.create_task(asyncio.to_thread(resolve_model, model, cache_dir, progress_line(), server.offline))
    await signals.first_of(resolving)
    if signals.count:
        os._exit(EXIT_INTERRUPTED)  # the thread of a download cannot be stopped, and a normal exit would wait for it
    found = resolving.result()
    kernels = cache_dir / "kernels"
    node = NodeModel(
        found.path,
        for_network(settings.engine, settings.endpoint.host, secret, membership.insecure),
        kernels,
        {"GOMP_SPINCOUNT": "10000", "TRITON_CACHE_DIR": str(kernels), **os.environ},
    )
    nodes = settings.engine.nodes

    def say_serving() -> None:
        ranks = ", ".join(map(str, node.ranks))
        print_message(f"Node {nodes.rank} of {nodes.count} computes ranks {ranks} for {nodes.head}.", sys.stdout)

    running = asyncio.create_task(NodeSupervisor(node, say_serving).run())
    with suppress(asyncio.CancelledError):
        await signals.first_of(running)
    return 0
