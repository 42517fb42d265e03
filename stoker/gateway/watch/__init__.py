"""Watching workers: health checks, KV events, load reports, metrics of foreign engines, registration."""
