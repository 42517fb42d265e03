"""Prefix keys of conversations, with which the prefix index is queried, and session keys."""
