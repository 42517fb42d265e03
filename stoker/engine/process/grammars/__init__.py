"""Structured output: grammars compiled by xgrammar, and the matchers that the engine uses."""
