"""Benchmarks of KV transfer, of the KV store and of prefill/decode hand-off."""
