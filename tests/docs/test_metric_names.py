"""Every metric that a page names exists. `*` stands for any part of a name."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from markdown_pages import PAGES, ROOT, code_words

KNOWN = set(re.findall(r"^\| `(stoker_\w+)` ", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
_METRIC = re.compile(r"(stoker_[\w*]+)(\{.*)?,?")


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_named_metric_exists(page: Path) -> None:
    found = [(word, match[1]) for word in code_words(page) if (match := _METRIC.fullmatch(word.text)) is not None]
    assert [str(word) for word, name in found if not any(fnmatchcase(known, name) for known in KNOWN)] == []
