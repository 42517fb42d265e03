"""Puts tests/gateway on the import path: the dialect suite uses its world and mock workers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
