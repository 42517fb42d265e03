"""The SQLite store and files that are none of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.base.errors import ConfigError
from stoker.gateway.store.sqlite import SqliteStore


def test_a_file_that_is_not_a_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    """A wrong path may name any file, such as /etc/hosts, which others must still be able to read."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="not a SQLite file"):
        SqliteStore(file, "store")
    assert file.stat().st_mode & 0o777 == 0o644
    assert file.read_text() == "127.0.0.1 localhost\n"
