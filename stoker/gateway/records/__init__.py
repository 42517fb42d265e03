"""Records about requests: ledger, prices, usage, request log, metrics, traces."""
