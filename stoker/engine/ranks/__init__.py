"""The ranks of one engine: processes that execute the plans of rank 0."""
