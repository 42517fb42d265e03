"""Load on an OpenAI-compatible server, and what it looked like from the client's side."""
