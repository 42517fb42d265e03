"""What the tests of `stoker up` share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.up.state import RunDir, open_run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    """The run folder of a fleet, beside a folder for its logs."""
    (tmp_path / "logs").mkdir()
    ours = open_run_dir(tmp_path / "fleets", 9)
    yield ours
    ours.remove()
