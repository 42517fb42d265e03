"""Where the parts of a fleet run: on this machine, or on the machines of a Ray cluster."""
