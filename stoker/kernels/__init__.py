"""Device functions, a file each: the reference in plain torch, and beside it the Triton kernel that is held to it."""
