"""All that crosses a process border."""
