"""The live workers: their health, load and speed, and which KV blocks each holds. Does no I/O; the time is an argument."""
