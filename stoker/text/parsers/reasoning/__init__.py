"""One file for each reasoning format."""
