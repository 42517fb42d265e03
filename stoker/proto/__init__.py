"""Every format that crosses a process boundary, with its encoder and decoder in one file."""
