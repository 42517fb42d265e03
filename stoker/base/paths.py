"""Paths in options and settings files. A shell does not expand the ~ in --flag=~/x, and no shell reads settings files."""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(text: str | Path) -> Path:
    """Return the path with a leading ~ expanded. A ~user that does not exist stays as it is."""
    return Path(os.path.expanduser(text))
