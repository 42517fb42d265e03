"""Which tokens run next. Pure: no torch, no I/O, and the time is an argument."""
