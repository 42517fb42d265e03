"""Conversations as block keys: what the prefix index is queried with, and the session key."""
