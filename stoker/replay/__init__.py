"""Records what a gateway's routing classes are told, and runs the recording again."""
