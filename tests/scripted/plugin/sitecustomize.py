"""Python imports this at its start if its folder is on PYTHONPATH. It adds the scripted family to the model registry."""

from __future__ import annotations

from pathlib import Path

import stoker.models

stoker.models.__path__.append(str(Path(__file__).parent / "families"))
