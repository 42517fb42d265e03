"""/ui serves the dashboard's own files and nothing else, with a policy under which only they can run."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from stoker.base.errors import NotFound
from stoker.gateway.api.reply import Reply
from stoker.gateway.ui.static_pages import STATIC_DIR, StaticPages

OWN = [path for path in sorted(STATIC_DIR.rglob("*")) if path.is_file() and "vendor" not in path.parts]
SCRIPTS = [path for path in OWN if path.suffix == ".js"]


class Asked:
    query = b""
    body = b""

    def __init__(self, path: str, method: str = "GET", etag: bytes | None = None) -> None:
        self.path, self.method, self._etag = path.encode(), method.encode(), etag

    def header(self, name: bytes) -> bytes | None:
        return self._etag if name == b"if-none-match" else None


def get(path: str, method: str = "GET", etag: bytes | None = None) -> Reply:
    return asyncio.run(StaticPages().answer(Asked(path, method, etag)))


def test_the_page_is_served_with_a_strict_policy() -> None:
    reply = get("/ui/")
    headers = dict(reply.headers)
    assert reply.status == 200
    assert b"<script" in reply.body
    policy = headers[b"content-security-policy"].decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert get("/ui").status == 308
    assert dict(get("/ui").headers)[b"location"] == b"/ui/"


def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    etag = dict(get("/ui/app.js").headers)[b"etag"]
    again = get("/ui/app.js", etag=etag)
    assert (again.status, again.body) == (304, b"")
    assert get("/ui/app.js", etag=b'"other"').status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/ui/../static_pages.py",
        "/ui/%2e%2e/static_pages.py",
        "/ui//etc/passwd",
        "/ui/vendor",
        "/ui/vendor/vendor.toml",
        "/ui/x",
    ],
)
def test_nothing_else_is_served(path: str) -> None:
    with pytest.raises(NotFound):
        get(path)


def test_only_reading_is_allowed() -> None:
    assert get("/ui/", "POST").status == 405
    assert get("/ui/", "HEAD").status == 200


def test_the_files_refer_only_to_each_other() -> None:
    for path in OWN:
        text = path.read_text(encoding="utf-8")
        outside = re.findall(r"(?:https?:)?//[a-z][a-z0-9.-]+\.[a-z]+", text.replace("http://www.w3.org/2000/svg", ""))
        assert outside == [], path
    for path in SCRIPTS:
        for name in re.findall(r'from "([^"]+)"', path.read_text(encoding="utf-8")):
            assert (path.parent / name).resolve().is_file(), f"{path.name} imports {name}"
    index = (STATIC_DIR / "index.html").read_text(encoding="utf-8")
    for name in re.findall(r'(?:src|href)="([^"]+)"', index):
        assert (STATIC_DIR / name).is_file(), name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_turns_text_into_html(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function", "srcdoc"):
        assert word not in text, word


def test_the_page_has_no_inline_script_or_style() -> None:
    index = (STATIC_DIR / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)", index) == []
    assert "<style" not in index
    assert re.findall(r"\son[a-z]+=|\sstyle=", index) == []
