"""Every row of a Markdown table has as many cells as the table's head. A `|` within a cell must be escaped, also in backticks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown_pages import PAGES, ROOT, fences_and_prose

_RULE = re.compile(r"^\|(\s*:?-+:?\s*\|)+$")
_BORDER = re.compile(r"(?<!\\)\|")


def wrong_rows(page: Path) -> list[str]:
    rows, wrong, num_cells = dict(fences_and_prose(page)[1]), [], 0
    for number, line in rows.items():
        if _RULE.match(line):
            num_cells = len(_BORDER.findall(line))
        elif not line.startswith("|"):
            num_cells = 0
        row = rows.get(number - 1, "") if _RULE.match(line) else line
        if num_cells and len(_BORDER.findall(row)) != num_cells:
            wrong.append(f"{page.relative_to(ROOT)}:{number}: {row[:100]}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_row_of_a_table_has_the_cells_of_its_head(page: Path) -> None:
    assert wrong_rows(page) == []
