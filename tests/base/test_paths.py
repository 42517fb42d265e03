from __future__ import annotations

from pathlib import Path

import pytest

from stoker.base.paths import expand_home


def test_a_home_folder_is_expanded_and_an_unknown_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expand_home("~/kv") == expand_home(Path("~/kv")) == Path("/home/me/kv")
    assert expand_home("~no-such-user/kv") == Path("~no-such-user/kv")
    assert expand_home("kv/~") == Path("kv/~")
