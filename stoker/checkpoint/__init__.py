"""A model's files: where they come from, and how they become a folder that the engine loads."""
