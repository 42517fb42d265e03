"""KV transports: how the bytes of a peer's blocks get into our pool, one file each."""
