"""Load generation for OpenAI-compatible servers, measured from the client's side."""
