"""One file for each tool-call format."""
