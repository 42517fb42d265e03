"""Watching workers: health, KV events, load reports, metrics of foreign engines, registration."""
