"""Who is there, how well, how loaded, and who holds which blocks. Pure: no I/O, the time is an argument."""
