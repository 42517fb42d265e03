"""Dialects: how the gateway talks to each kind of worker, one file each."""
