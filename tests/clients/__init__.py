"""Clients that are not part of the project, run against a real gateway."""
