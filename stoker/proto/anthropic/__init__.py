"""Anthropic's Messages API: requests, answers, events and errors, and the translation of its requests to chat."""
