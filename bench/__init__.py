"""Benchmarks of Stoker. `python -m bench` lists them; docs/benchmarks.md explains how to run them."""
