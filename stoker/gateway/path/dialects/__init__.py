"""Dialects: how each kind of worker is called, one file each."""
