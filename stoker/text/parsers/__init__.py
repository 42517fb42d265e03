"""Parsers of the formats in which models write tool calls and reasoning. Each format is one file, found by its name."""
