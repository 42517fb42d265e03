"""A file for each format of tool calls."""
