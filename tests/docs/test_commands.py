"""Every fenced shell command in README, CONTRIBUTING and docs is in tables.toml: run by a test, or with the reason why not."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from markdown_pages import PAGES, ROOT, Found, shell_commands

from stoker.cli.main import build_parser, find_commands

TABLE = Path(__file__).parent / "tables.toml"
ROWS: list[dict[str, Any]] = tomllib.loads(TABLE.read_text())["command"]
COMMANDS = [command for page in PAGES for command in shell_commands(page)]
WAYS = {"run", "tested_by", "not_run"}


def row_of(command: Found) -> dict[str, Any] | None:
    return next((row for row in ROWS if matches(row, command)), None)


def matches(row: dict[str, Any], command: Found) -> bool:
    pattern = ".*".join(re.escape(part) for part in row["command"].split("*"))
    return re.fullmatch(pattern, command.text) is not None


def test_every_fenced_command_is_in_the_table() -> None:
    unknown = [str(command) for command in COMMANDS if row_of(command) is None]
    assert unknown == [], "\n".join(["add these to tests/docs/tables.toml, which explains how:", *unknown])


def test_every_row_is_used_and_says_one_thing() -> None:
    unused = [row["command"] for row in ROWS if not any(matches(row, command) for command in COMMANDS)]
    assert unused == [], "\n".join(
        ["no page has these commands any more; remove them from tests/docs/tables.toml:", *unused]
    )
    wrong = [row["command"] for row in ROWS if len(WAYS & row.keys()) != 1 or row.keys() - WAYS - {"command", "expect"}]
    assert wrong == [], "\n".join([f"each of these rows needs exactly one of {', '.join(sorted(WAYS))}:", *wrong])


@pytest.mark.parametrize("row", [row for row in ROWS if "tested_by" in row], ids=lambda row: row["command"])
def test_the_test_that_runs_a_command_exists(row: dict[str, Any]) -> None:
    file, _, name = row["tested_by"].partition("::")
    assert (ROOT / file).is_file(), f"{row['tested_by']}: no such file"
    if name:
        source = (ROOT / file).read_text()
        assert re.search(rf"^(async )?def {name}\(", source, re.M), f"{row['tested_by']}: no such test"


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.text.startswith("stoker ")], ids=str)
def test_the_command_line_is_accepted(command: Found, capsys: pytest.CaptureFixture[str]) -> None:
    """Parsed, not run: options that no longer exist are found also in commands that no test runs."""
    code: object = 0
    try:
        build_parser(find_commands()).parse_args(shlex.split(command.text)[1:])
    except SystemExit as ended:  # --help and wrong arguments end the process
        code = ended.code
    assert code == 0, f"{command}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.text.startswith("python ")], ids=str)
def test_the_script_exists(command: Found) -> None:
    words = shlex.split(command.text)
    if words[1] == "-m":
        path = ROOT.joinpath(*words[2].split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), str(command)
    else:
        assert (ROOT / words[1]).is_file(), str(command)
