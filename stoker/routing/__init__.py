"""Choose a worker for each request: filter, score, choose and reserve. Does no I/O; the time is an argument."""
