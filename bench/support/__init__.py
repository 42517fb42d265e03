"""Shared parts of the benchmarks: model shapes, mock workers, load generators, start commands of competitors."""
