"""What is recorded of each request: ledger, prices, usage, request log, metrics, traces."""
