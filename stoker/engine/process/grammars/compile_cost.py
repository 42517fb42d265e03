"""Predicts from a grammar's text whether compiling it is certainly fast."""

from __future__ import annotations

import json
import re

from stoker.sched.request import GrammarSpec
from stoker.text.parsers.grammar import OWN_PATTERNS

# Within these limits, compiling takes at most 2 s, or 10 s for a schema with 10,000 enum values. Each unit of a repetition
# count, or of a length in a schema, costs at most about 1 ms.
_MAX_REGEX_CHARS, _MAX_SCHEMA_CHARS = 1024, 256 << 10
_MAX_COUNTS = 2048
_IN_BRACES, _NUMBER = re.compile(r"\{[^{}]*\}"), re.compile(r"\d+")
_QUANTIFIED_GROUP = re.compile(r"\)\s*[*+?{]")
_SCHEMA_COUNT = re.compile(r'"(?:min|max)(?:Length|Items|Properties)"\s*:\s*(\d[\d.e+]*)')
_EMBEDDED_PATTERN = re.compile(r'"(pattern|grammar)')  # in a schema, or in a structural tag
_OWN_PATTERN = re.compile("|".join(re.escape(f'"pattern": {json.dumps(own)}') for own in OWN_PATTERNS))


def is_cheap_to_compile(spec: GrammarSpec) -> bool:
    """Return True if the grammar can be compiled without a trial (trials.py)."""
    if spec.kind == "json_object":
        return True
    if spec.kind == "ebnf" or spec.inputs:
        return False
    if spec.kind == "regex":
        if len(spec.text) > _MAX_REGEX_CHARS or _QUANTIFIED_GROUP.search(spec.text):
            return False
        counts = _NUMBER.findall(" ".join(_IN_BRACES.findall(spec.text)))
    else:
        if len(spec.text) > _MAX_SCHEMA_CHARS or _EMBEDDED_PATTERN.search(_OWN_PATTERN.sub("", spec.text)):
            return False
        counts = _SCHEMA_COUNT.findall(spec.text)
    return sum(map(float, counts)) <= _MAX_COUNTS  # float, because int() rejects numbers with too many digits
