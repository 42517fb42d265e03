"""Generated pages are up to date, every error code is explained, and the site builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_pages import ROOT

from bench.contract import names_by_group
from stoker.cli.commands import reference
from stoker.cli.main import main

_CODE = re.compile(r"\bcode(?: = |=)\"([a-z][a-z0-9_]+)\"")


def test_the_reference_of_commands_is_up_to_date() -> None:
    page = ROOT / "docs" / "commands.md"
    assert page.read_text().rstrip() == reference(), "run: stoker commands > docs/commands.md"


def test_every_error_code_is_explained() -> None:
    codes = {code for path in (ROOT / "stoker").rglob("*.py") for code in _CODE.findall(path.read_text())}
    assert len(codes) > 40
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert sorted(code for code in codes if f"`{code}`" not in page) == []


def test_every_benchmark_has_a_row() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = page.partition("### What each benchmark needs")[2].partition("\n### ")[0]
    assert [name for names in names_by_group().values() for name in names if f"`{name}`" not in rows] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE))


def test_the_fleet_of_the_tutorial_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)
    fleet = tmp_path / "fleet.toml"
    # Machines without GPUs and with little RAM run this test too.
    fleet.write_text(re.sub(r"devices = .*\n", "", block).replace("host_gib = 32", "host_gib = 0.1"))
    assert main(["up", str(fleet), "--check"]) == 0
    printed = capsys.readouterr().out
    assert "--role prefill" in printed
    assert "--role decode" in printed


def test_the_site_builds_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?(?:https?:)?//[^\s\"'>]+", page) == []
