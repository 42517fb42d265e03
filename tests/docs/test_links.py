"""Every relative link, anchor and file path in README, CONTRIBUTING and docs exists."""

from __future__ import annotations

import re
import tomllib
from itertools import product
from pathlib import Path

import pytest
from markdown_pages import PAGES, ROOT, Found, anchors, code_words, links

TABLE = tomllib.loads((Path(__file__).parent / "tables.toml").read_text())
NOT_IN_THE_REPOSITORY: list[str] = TABLE["not_in_the_repository"]
TOP_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}
SOURCE = re.compile(r"[\w./{},*-]+\.(py|md)$")
FOLDER = re.compile(r"[\w.-]+(/[\w.{},*-]+)*/$")
BELOW_A_TOP_FOLDER = re.compile(r"([\w.-]+)/[\w./{},*-]+$")

ids = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for link in links(page):
        name, _, anchor = link.text.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            wrong.append(f"{link} (no such file)")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{link} (no such heading; there are: {', '.join(sorted(anchors(target)))})")
    assert wrong == [], "\n".join(["links that lead nowhere:", *wrong])


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_file_paths_in_backticks_exist(page: Path) -> None:
    """A path may be written from the root, from the folder of the page, or without its first folders (`kv/pool.py`)."""
    wrong = [str(word) for word in code_words(page) if is_path(word.text) and not exists(word)]
    assert wrong == [], "\n".join(
        [
            "paths that do not exist. Write placeholders in capitals (`FILE.md`), or `x.py` for a file that the reader adds.",
            "Other paths that are not in the repository go into `not_in_the_repository` of tests/docs/tables.toml:",
            *wrong,
        ]
    )


def is_path(word: str) -> bool:
    if word in NOT_IN_THE_REPOSITORY or word.startswith(("/", "-", ".", "~")):
        return False
    if any(part.isupper() for part in re.split(r"[/.-]", word)) and not exists_as(word, ROOT):
        return False  # a placeholder
    below = BELOW_A_TOP_FOLDER.fullmatch(word)
    return bool(SOURCE.fullmatch(word) or FOLDER.fullmatch(word) or (below and below[1] in TOP_FOLDERS))


def exists(word: Found) -> bool:
    """Return True if the path exists. Braces and stars are expanded; of `folder/x.py`, only the folder must exist."""
    path = re.sub(r"(^|/)x\.py$", "", word.text.rstrip("/"))
    return all(exists_as(text, word.page.parent) for text in expanded(path) if text)


def exists_as(text: str, folder: Path) -> bool:
    if any(next(place.glob(text), None) for place in (ROOT, folder)):
        return True
    return any(next((ROOT / top).rglob(text), None) for top in ("stoker", "tests", "bench", "scripts", "docs"))


def expanded(text: str) -> list[str]:
    parts = re.split(r"\{([^{}]*)\}", text)
    choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]
