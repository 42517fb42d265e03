"""Records the calls to a gateway's routing classes, and replays the recording."""
