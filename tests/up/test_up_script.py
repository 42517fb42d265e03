"""scripts/up is `stoker up`, from wherever it is called."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "up"


def test_files_are_named_from_where_the_script_is_called(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "stoker", tmp_path / "elsewhere"
    for folder in (root / "scripts", root / ".venv/bin", elsewhere):
        folder.mkdir(parents=True)
    shutil.copy(SCRIPT, root / "scripts")
    (root / "scripts/environment").write_text(f'ensure_environment() {{ [ "$PWD" = "{root}" ]; }}\n')
    command = root / ".venv/bin/stoker"
    command.write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    command.chmod(0o755)
    shown = subprocess.run(
        ["../stoker/scripts/up", "fleet.toml"], cwd=elsewhere, capture_output=True, text=True, check=True
    ).stdout
    assert shown == f"{elsewhere} up fleet.toml\n"
