"""Speculative decoding on the host: drafters that guess continuations, and what becomes of their guesses. Pure."""
