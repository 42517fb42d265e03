from __future__ import annotations

from pathlib import Path

import pytest

from stoker.base.paths import written_path


def test_a_home_is_filled_in_and_one_of_nobody_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert written_path("~/kv") == written_path(Path("~/kv")) == Path("/home/me/kv")
    assert written_path("~no-such-user/kv") == Path("~no-such-user/kv")
    assert written_path("kv/~") == Path("kv/~")
