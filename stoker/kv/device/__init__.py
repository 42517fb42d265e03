"""KV blocks in device memory: the tensors, and checksums of their bytes."""
