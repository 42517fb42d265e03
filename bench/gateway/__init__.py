"""Benchmarks of the gateway and of routing."""
