"""Where KV blocks lie when the device has no room for them: a file for each tier."""
