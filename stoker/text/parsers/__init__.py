"""Formats in which models write tool calls and reasoning: a file for each, found by name."""
