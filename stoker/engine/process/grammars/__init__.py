"""Grammars for structured output, compiled with xgrammar."""
