"""How workers of each kind are spoken to: a file each."""
