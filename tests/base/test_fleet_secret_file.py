"""The file with the fleet's secret: one line, or two while the secret is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.base.errors import ConfigError
from stoker.base.fleet_key import REQUESTS, FleetKey, read_fleet_secret

OLD, NEW = "the old secret of this fleet", "the new secret of this fleet"


def test_two_lines_are_two_accepted_secrets(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{NEW}\n{OLD}\n")
    secret = read_fleet_secret(path, "--secret-file")
    assert secret is not None
    key = FleetKey(secret)
    assert key.derive(REQUESTS) == FleetKey(NEW).derive(REQUESTS)
    assert [one.key_id for one in key.accepted] == [FleetKey(NEW).key_id, FleetKey(OLD).key_id]
    assert key.with_id(FleetKey(OLD).key_id).derive(REQUESTS) == FleetKey(OLD).derive(REQUESTS)
    assert key.with_id(None) is key
    assert FleetKey(OLD).key_id not in OLD


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no secret"),
        (f"{OLD}\n{NEW}\n{OLD}x", "has 3 lines"),
        (f"{OLD}\nshort", "a secret of 5 characters"),
        (f"{OLD}\n\n{NEW}", "holds no secret"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_fleet_secret(path, "--secret-file")
