"""The `stoker` command: a file for each of its commands."""
