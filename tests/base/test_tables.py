from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stoker.base.errors import ConfigError
from stoker.base.tables import in_words, read_tables, refuse_unknown


@dataclass(frozen=True)
class Inner:
    port: int = 0


@dataclass(frozen=True)
class Outer:
    listen: Inner = field(default_factory=Inner)
    worker: tuple[Inner, ...] = ()
    level: str = "info"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"levle": "x"}, "f: levle: no such setting; did you mean level?"),
        ({"listen": {"prot": 1}}, "f: listen.prot: no such setting; did you mean listen.port?"),
        ({"worker": [{}, {"zzz": 1}]}, r"f: worker\[1\].zzz: no such setting; there are: port"),
    ],
    ids=["here", "inside", "in a list"],
)
def test_a_misspelt_name_is_no_default(table: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_unknown(Outer, table, source="f: ")


def test_names_that_are_known_pass() -> None:
    refuse_unknown(Outer, {"listen": {"port": 1}, "worker": [{"port": 2}], "level": 5})


def test_a_complaint_begins_with_its_field() -> None:
    wrong = "Expected `int`, got `str` - at `$.port`"
    assert in_words(wrong, "listen") == "listen.port: expected `int`, got `str`"
    assert in_words(wrong) == "port: expected `int`, got `str`"


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_tables(tmp_path / "absent.toml")
    (tmp_path / "odd.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="not TOML"):
        read_tables(tmp_path / "odd.toml")
