"""OpenAI's request, answer, chunk and error shapes: a file for each API, and one for what they share."""
