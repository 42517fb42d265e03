"""Processes for tests. They are forked from a process that has imported torch and the kv package and done nothing else,
so that they start in milliseconds."""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "torch",
        "stoker.kv.peer.peer_server",
        "stoker.kv.peer.peer_client",
        "stoker.kv.store.tiers.host.host_tier",
        "stoker.kv.store.tiers.disk.disk_tier",
    ]
)
