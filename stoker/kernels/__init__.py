"""Device functions, a file each, in plain torch: the reference that every faster kernel is held to."""
