"""Paths as people write them. A shell leaves the ~ in --flag=~/x as it is, and a file of settings knows no shell."""

from __future__ import annotations

import os
from pathlib import Path


def written_path(text: str | Path) -> Path:
    """With their own folder for ~; a ~ that means nobody stays."""
    return Path(os.path.expanduser(text))
