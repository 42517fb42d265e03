from __future__ import annotations

from pathlib import Path

import pytest

from stoker.base.paths import written_path


def test_a_home_folder_is_expanded_and_an_unknown_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert written_path("~/kv") == written_path(Path("~/kv")) == Path("/home/me/kv")
    assert written_path("~no-such-user/kv") == Path("~no-such-user/kv")
    assert written_path("kv/~") == Path("kv/~")
