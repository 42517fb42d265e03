"""Routing policies, a file each; `stoker.routing.policy` is their contract."""
