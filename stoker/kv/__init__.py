"""KV blocks: what they are (blocks), their device memory (device), the store below it (store), other workers (peer)."""
