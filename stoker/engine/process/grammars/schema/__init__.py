"""Conversion of JSON schemas to a form that xgrammar enforces completely."""
