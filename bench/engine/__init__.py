"""Benchmarks of the engine and of one worker."""
