"""Processes for tests: forked from one that has loaded torch and the kv package and done nothing else, so that one is there in
milliseconds."""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["torch", "stoker.kv.peer_server", "stoker.kv.peer_client", "stoker.kv.tiers.host", "stoker.kv.tiers.disk"]
)
