"""Error messages name a command that installs an extra, and extras that exist."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from stoker.base.extras import install_command

ROOT = Path(__file__).parents[2]


def test_in_a_clone_the_extra_is_installed_from_the_clone() -> None:
    assert install_command("mooncake") == f"{sys.executable} -m pip install -e '{ROOT}[mooncake]'"


def test_an_installed_package_gets_the_extra_from_the_index(tmp_path: Path) -> None:
    assert install_command("mooncake", tmp_path) == f"{sys.executable} -m pip install 'stoker[mooncake]'"


def test_every_extra_that_a_message_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = "".join(path.read_text() for path in (ROOT / "stoker").rglob("*.py"))
    named = re.findall(r"install_command\(['\"](\w+)['\"]\)", sources)
    assert named
    assert set(named) <= extras.keys()
    # No other way to write the command, which would be wrong in a clone.
    assert not re.search(r"pip install '?stoker\[\w+\]", sources)
