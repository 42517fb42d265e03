"""Where the public prompt sets and traces lie. They are not part of the repository."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.contract import ROOT, BenchmarkError

PLACES = (ROOT / "data", ROOT.parent / "data", ROOT.parent / "shared" / "data")
PLACES_HELP = "data in the repository, or data or shared/data beside it"


def find(given: Path | None, files: Sequence[str]) -> Path:
    """Return the data folder, after checking that it holds these files."""
    places = PLACES if given is None else (given,)
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        looked = ", ".join(map(str, places))
        raise BenchmarkError(f"there is no data folder at {looked}; name it with --data DIR (see docs/benchmarks.md)")
    missing = [name for name in files if not (folder / name).exists()]
    if missing:
        raise BenchmarkError(f"the data folder {folder} has no {', '.join(missing)}; see docs/benchmarks.md")
    return folder
