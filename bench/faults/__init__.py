"""Runs that kill processes or exhaust memory, and check that every answer is still right."""
