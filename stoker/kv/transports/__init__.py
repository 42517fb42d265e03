"""Ways to move a peer's blocks into our own pool: a file for each."""
