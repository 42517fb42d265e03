"""`stoker up`: a whole fleet on this machine, from a file of settings to processes that are watched and stopped in order."""
