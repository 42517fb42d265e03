"""Paths in options and settings files. A shell does not expand the ~ in --flag=~/x, and settings files have no shell."""

from __future__ import annotations

import os
from pathlib import Path


def written_path(text: str | Path) -> Path:
    """Return the path with a leading ~ expanded. A ~user that does not exist stays as it is."""
    return Path(os.path.expanduser(text))
