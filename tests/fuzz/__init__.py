"""Fuzzers of everything that reads bytes from outside: one file per target in `targets/`, run by `scripts/fuzz`."""
