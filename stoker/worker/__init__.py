"""A worker: the OpenAI server over one engine process."""
