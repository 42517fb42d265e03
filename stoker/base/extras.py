"""How to install an optional dependency (an extra of pyproject.toml), for error messages."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def install_command(extra: str, root: Path = _ROOT) -> str:
    """Return the command that installs an extra: from the clone that this code runs in, or else from the package index."""
    package = f"-e '{root}[{extra}]'" if (root / "pyproject.toml").is_file() else f"'stoker[{extra}]'"
    return f"{sys.executable} -m pip install {package}"
