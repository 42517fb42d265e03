"""Importing this lets scripts import tests on a machine without pytest."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

if find_spec("pytest") is None:
    sys.modules["pytest"] = MagicMock()
