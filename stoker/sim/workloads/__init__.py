"""Sources of simulated requests, one file each. `workload.py` has the contract."""
