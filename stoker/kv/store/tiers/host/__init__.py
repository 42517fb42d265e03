"""The host tier: blocks in RAM, private to a worker or in shared memory for all workers of a machine."""
