"""One declaration of a setting gives its flag, its TOML key, its help text and its range check."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stoker.base.errors import ConfigError
from stoker.base.flags import add_flags, as_table, given_flags
from stoker.base.settings import (
    check_settings,
    declared,
    from_table,
    read_toml,
    required,
    same_as,
    setting,
    setting_map,
)


@dataclass(frozen=True, slots=True)
class Inner:
    REMOVED: ClassVar[tuple[str, ...]] = ("path",)
    port: int = setting(0, "Port.", flag="--port", ge=0, le=65535)
    size_gib: float | None = setting(None, "Size.", flag="--size-gib", unit="GiB", gt=0, renamed_from=("--big-gib",))
    quiet: bool = setting(False, "Say nothing.", flag="--quiet")
    loud: bool = setting(True, "Say all.", flag="--not-loud", flag_help="Do not say all.")
    hidden: int = 7  # internal

    def __post_init__(self) -> None:
        check_settings(self, "listen")


@dataclass(frozen=True, slots=True)
class Entry:
    name: str = required("Name.", pattern="[a-z]+", expected="lower-case letters")
    labels: dict[str, str] = setting_map("Labels.")


@dataclass(frozen=True, slots=True)
class Outer:
    listen: Inner = field(default_factory=Inner)
    entry: tuple[Entry, ...] = ()
    level: str = setting("info", "Level.", flag="--level", choices=("debug", "info"))
    names: tuple[str, ...] = setting((), "Names.", flag="--name", default_text="none")
    ways: tuple[str, ...] = setting(("a", "b"), "Ways.", flag="--ways", commas=True, pattern=".+", metavar="WAYS")
    folder: Path | None = setting(None, "Folder.", flag="--folder")


def parse(*words: str) -> Outer:
    parser = argparse.ArgumentParser()
    add_flags(parser, declared(Outer))
    return from_table(Outer, as_table(given_flags(parser.parse_args(words), declared(Outer))))


def test_without_flags_all_settings_have_their_defaults() -> None:
    assert parse() == Outer() == from_table(Outer, {})


def test_flags_and_toml_give_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    flags = parse(
        *("--port", "9", "--size-gib", "1.5", "--quiet", "--not-loud", "--level", "debug"),
        *("--name", "x", "--name", "y", "--ways", "c,d", "--folder", "~/f"),
    )
    table = {
        "listen": {"port": 9, "size_gib": 1.5, "quiet": True, "loud": False},
        "level": "debug",
        "names": ["x", "y"],
        "ways": "c,d",
        "folder": "~/f",
    }
    assert flags == from_table(Outer, table)
    assert flags.folder == Path("/home/me/f")
    assert (flags.names, flags.ways) == (("x", "y"), ("c", "d"))


def test_a_value_is_turned_back_into_its_flag() -> None:
    by_key = {one.key: one for one in declared(Outer)}
    assert by_key["listen.port"].arguments(5) == ["--port", "5"]
    assert by_key["listen.quiet"].arguments(True) == ["--quiet"]
    assert by_key["listen.quiet"].arguments(False) == []
    assert by_key["listen.loud"].arguments(False) == ["--not-loud"]
    assert by_key["names"].arguments(("x", "y")) == ["--name", "x", "--name", "y"]
    assert by_key["ways"].arguments(("x", "y")) == ["--ways", "x,y"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"levle": "x"}, "levle: no such setting; did you mean level?"),
        ({"listen": {"prot": 1}}, "listen.prot: no such setting; did you mean listen.port?"),
        ({"listen": {"path": 1}}, "listen.path: this setting was removed; delete it from the configuration"),
        ({"listen": {"hidden": 1}}, "listen.hidden: no such setting; choose one of: loud, port, quiet, size_gib"),
        ({"entry": [{"name": "a"}, {"zzz": 1}]}, "entry[1].zzz: no such setting; choose one of: labels, name"),
        ({"entry": [{}]}, "entry[0].name is missing: give lower-case letters"),
        ({"entry": {}}, "entry={}: write an array of tables, [[entry]]"),
        ({"entry": [{"name": "A"}]}, "entry[0].name='A': give lower-case letters"),
        ({"entry": [{"name": "a", "labels": {"x": 1}}]}, "entry[0].labels.x=1: give a table of texts"),
        ({"listen": 3}, "listen=3: write a table, [listen]"),
        ({"listen": {"port": "x"}}, "listen.port='x': give a whole number from 0 to 65535"),
        ({"listen": {"port": True}}, "listen.port=True: give a whole number from 0 to 65535"),
        ({"listen": {"port": 1.5}}, "listen.port=1.5: give a whole number from 0 to 65535"),
        ({"listen": {"port": 70000}}, "listen.port=70000: give a whole number from 0 to 65535"),
        ({"listen": {"size_gib": 0}}, "listen.size_gib=0: give a number of GiB above 0"),
        ({"listen": {"size_gib": float("inf")}}, "listen.size_gib=inf: give a number of GiB above 0"),
        ({"listen": {"size_gib": 10**400}}, f"listen.size_gib={10**400}: give a number of GiB above 0"),
        ({"listen": {"port": 10**400}}, f"listen.port={10**400}: give a whole number from 0 to 65535"),
        ({"listen": {"quiet": 1}}, "listen.quiet=1: give true or false"),
        ({"level": "loud"}, "level='loud': give debug or info"),
        ({"names": [1]}, "names=1: give a list of texts"),
        ({"level": "x\0"}, "level='x\\x00': give debug or info"),
    ],
    ids=str,
)
def test_a_wrong_table_is_refused_with_the_key_and_what_to_give(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_table(Outer, table)
    assert refused.value.message == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--port", "x"), "--port x: give a whole number from 0 to 65535"),
        (("--port", "-1"), "--port -1: give a whole number from 0 to 65535"),
        (("--size-gib", "nan"), "--size-gib nan: give a number of GiB above 0"),
        (("--level", "loud"), "--level loud: give debug or info"),
        (("--ways", "a,,b"), "--ways a,,b: give a list of texts"),
        (("--big-gib", "3"), "--big-gib was renamed: use --size-gib"),
        (("--big-gib",), "--big-gib was renamed: use --size-gib"),
    ],
    ids=str,
)
def test_a_wrong_flag_is_refused_with_its_name_and_what_to_give(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(*words)
    assert refused.value.message == said


def test_a_settings_class_checks_itself_also_when_code_builds_it() -> None:
    with pytest.raises(ConfigError, match=r"listen\.port=-1: give a whole number from 0 to 65535"):
        Inner(port=-1)


def test_help_has_the_text_the_default_and_the_unit() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, declared(Outer))
    shown = " ".join(parser.format_help().split())
    assert "--size-gib GIB Size." in shown
    assert "--port N Port. Default: 0." in shown
    assert "--level {debug,info} Level. Default: info." in shown
    assert "--not-loud Do not say all." in shown
    assert "--ways WAYS Ways. Default: a,b." in shown
    assert "big-gib" not in shown


def test_a_declaration_can_be_taken_from_another_class() -> None:
    @dataclass(frozen=True)
    class Other:
        port: int = same_as(Inner, "port", default=80, help="Another port.")

    (one,) = declared(Other)
    assert (one.default, one.setting.help, one.setting.le, one.setting.flag) == (80, "Another port.", 65535, None)


def test_an_unreadable_toml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_toml(tmp_path / "absent.toml")
    (tmp_path / "odd.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="not TOML"):
        read_toml(tmp_path / "odd.toml")
