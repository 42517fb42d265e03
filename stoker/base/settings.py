"""Settings that are declared once. Flags, TOML keys, `--help`, validation and docs/settings.md derive from the declaration.

A settings class is a frozen dataclass whose fields are declared with `setting()`:

    @dataclass(frozen=True, slots=True)
    class ListenSettings:
        port: int = setting(8000, "Port to listen on. 0 picks a free port.", flag="--port", ge=0, le=65535)

        def __post_init__(self) -> None:
            check_settings(self, "listen")

A field's type is bool, int, float, str, Path, a tuple of these, dict[str, str], another settings class (a TOML table), or a
tuple of settings classes (an array of tables); each may be optional (`| None`). A field without `setting()` that is not a
settings class is internal: the program fills it in, and neither flags nor TOML can set it. A class may list earlier keys in
`REMOVED: ClassVar[tuple[str, ...]]`, or with their new dotted keys in `RENAMED: ClassVar[dict[str, str]]`. Using one of them is
an error that says so.

Only the standard library is used, because the engine's settings are declared here too.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stoker.base.errors import ConfigError
from stoker.base.paths import expand_home

T = TypeVar("T")
_KEY = "setting"


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting, apart from its name, type and default, which the dataclass field has."""

    help: str  # full sentences
    flag: str | None = None  # such as "--port"; None: only TOML can set it
    flag_help: str | None = None  # help of a flag that means the opposite of its key, such as --no-tokenize
    metavar: str | None = None
    unit: str | None = None  # s, GiB, MiB, tokens
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str | None = None  # a regular expression that text must match
    expected: str | None = None  # what to give, for errors, if the type, range and choices do not describe it
    default_text: str | None = None  # the default in words, if the program computes it
    renamed_from: tuple[str, ...] = ()  # earlier flags, which are refused with an error that names the new one
    is_path: bool = False  # the text is a path: a leading ~ is expanded
    commas: bool = False  # a list may also be given as one string with commas


def setting(default: T, help: str, **declaration: Any) -> T:
    """Declare a setting with its default. The keyword arguments are those of `Setting`."""
    declared: T = dataclasses.field(default=default, metadata={_KEY: Setting(help, **declaration)})
    return declared


def required(help: str, **declaration: Any) -> Any:
    """Declare a setting that has no default."""
    return dataclasses.field(metadata={_KEY: Setting(help, **declaration)})


def setting_map(help: str, **declaration: Any) -> dict[str, str]:
    """Declare a table that maps names to strings. It is empty by default."""
    declared: dict[str, str] = dataclasses.field(default_factory=dict, metadata={_KEY: Setting(help, **declaration)})
    return declared


def same_as(kind: Any, name: str, **changes: Any) -> Any:
    """Declare a setting like the one called `name` in another settings class, without its flag.

    `changes` replace fields of the declaration. `default` in them replaces the default.
    """
    (original,) = (field for field in dataclasses.fields(kind) if field.name == name)
    default = changes.pop("default", original.default)
    declaration = dataclasses.replace(original.metadata[_KEY], flag=None, renamed_from=(), **changes)
    return dataclasses.field(default=default, metadata={_KEY: declaration})


@dataclass(frozen=True, slots=True)
class _FieldType:
    """The type of a field, parsed from its type hint."""

    inner: type  # a scalar or a settings class
    is_list: bool = False
    is_map: bool = False

    @property
    def is_table(self) -> bool:
        return dataclasses.is_dataclass(self.inner)


@dataclass(frozen=True, slots=True)
class Declared:
    """One setting in a tree of settings classes, with its path from the root."""

    path: tuple[str, ...]  # ("listen", "port")
    setting: Setting
    shape: _FieldType
    default: Any  # dataclasses.MISSING: it must be given

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """Return the flag. Call it only for settings that have one."""
        assert self.setting.flag is not None, f"{self.key} has no flag"
        return self.setting.flag

    @property
    def flag_name(self) -> str:
        """Return the flag as a Python name, such as kv_memory_gib. It is also the key of [[workers]] in fleet.toml."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING and not self.shape.is_map

    @property
    def is_switch(self) -> bool:
        return self.shape.inner is bool

    @property
    def old_keys(self) -> list[str]:
        return [old.removeprefix("--").replace("-", "_") for old in self.setting.renamed_from]

    def parse(self, text: str, name: str) -> Any:
        """Parse `text` from the command line and check it. `name` is the flag for error messages."""
        if self.shape.is_list:
            parts = text.split(",") if self.setting.commas else [text]
            return [self._parse_one(part, name, text) for part in parts]
        return self._parse_one(text, name, text)

    def _parse_one(self, text: str, name: str, whole: str) -> Any:
        value: Any = text
        if self.shape.inner in (int, float):
            try:
                value = self.shape.inner(text)
            except ValueError:
                raise self._refused(name, whole) from None
        return self._checked(value, name, whole)

    def convert(self, value: Any, name: str) -> Any:
        """Convert a value from a TOML file and check it. `name` is the key for error messages."""
        if self.shape.is_map:
            if not isinstance(value, dict):
                raise self._refused(name, value)
            return {key: self._convert_one(one, f"{name}.{key}") for key, one in value.items()}
        if self.shape.is_list:
            if isinstance(value, str) and self.setting.commas:
                value = value.split(",")
            many = value if isinstance(value, list | tuple) else [value]
            return tuple(self._convert_one(one, name) for one in many)
        return self._convert_one(value, name)

    def _convert_one(self, value: Any, name: str) -> Any:
        kind = self.shape.inner
        accepted: tuple[type, ...] = {bool: (bool,), int: (int,), float: (int, float), Path: (str, Path)}.get(
            kind, (str,)
        )
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise self._refused(name, value)
        exact: Any = value
        if kind is float and isinstance(value, int):
            try:
                exact = float(value)
            except OverflowError:
                raise self._refused(name, value) from None
        return self._checked(exact, name, value)

    def _checked(self, value: Any, name: str, given: Any) -> Any:
        if not self.allows(value):
            raise self._refused(name, given)
        if self.shape.inner is Path:
            return expand_home(value)
        if self.setting.is_path:
            return str(expand_home(value))
        return value

    def allows(self, value: Any) -> bool:
        """Return True if the value is in the declared range, is one of the choices, or matches the pattern."""
        rule = self.setting
        if isinstance(value, str):
            return (
                (not rule.choices or value in rule.choices)
                and (rule.pattern is None or re.fullmatch(rule.pattern, value) is not None)
                and "\0" not in value
            )
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (
                (isinstance(value, int) or math.isfinite(value))
                and (rule.ge is None or value >= rule.ge)
                and (rule.gt is None or value > rule.gt)
                and (rule.le is None or value <= rule.le)
            )
        return True

    @property
    def values(self) -> str:
        """Describe the allowed values in words, such as `a number of GiB above 0`."""
        rule, kind = self.setting, self.shape.inner
        if rule.expected is not None:
            return rule.expected
        if rule.choices:
            return either(rule.choices)
        if self.shape.is_map:
            return "a table of texts"
        if kind is bool:
            return "true or false"
        if kind not in (int, float):
            words = ("a path", "a list of paths") if self.names_path else ("text", "a list of texts")
            return words[self.shape.is_list]
        noun = "whole number" if kind is int else "number"
        noun = f"a list of {noun}s" if self.shape.is_list else f"a {noun}"
        unit = "" if rule.unit is None else f" of {_UNITS.get(rule.unit, rule.unit)}"
        return f"{noun}{unit}{_range_words(rule)}"

    @property
    def names_path(self) -> bool:
        """Return True if the value is a path."""
        return self.shape.inner is Path or self.setting.is_path

    @property
    def default_words(self) -> str:
        """Return the default as `--help` and the reference page show it, or "" if there is none to show."""
        if self.setting.default_text is not None:
            return self.setting.default_text
        if self.is_switch:
            return "true" if self.default else "false"
        if self.default is None or self.default in (dataclasses.MISSING, ()):
            return ""
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        if isinstance(self.default, float):
            return f"{self.default:.12g}"
        return str(self.default)

    def arguments(self, value: Any) -> list[str]:
        """Return the command-line arguments that set this setting to the converted `value`."""
        if self.is_switch:
            return [self.flag] if value is not self.default else []
        if self.shape.is_list and self.setting.commas:
            return [self.flag, ",".join(value)]
        many = value if isinstance(value, tuple | list) else [value]
        return [word for one in many for word in (self.flag, str(one))]

    def _refused(self, name: str, value: Any) -> ConfigError:
        return ConfigError(f"{_shown(name, value)}: give {self.values}")


_UNITS = {"s": "seconds", "ms": "milliseconds"}


def _range_words(rule: Setting) -> str:
    low = rule.ge if rule.ge is not None else rule.gt
    low_word = "from" if rule.ge is not None else "above"
    if low is not None and rule.le is not None:
        joint = "to" if rule.ge is not None else "and at most"
        return f" {low_word} {low:.12g} {joint} {rule.le:.12g}"
    if low is not None:
        return f", at least {low:.12g}" if rule.ge is not None else f" above {low:.12g}"
    return "" if rule.le is None else f", at most {rule.le:.12g}"


def _shown(name: str, value: Any) -> str:
    return f"{name} {value}" if name.startswith("--") else f"{name}={value!r}"


def either(words: Iterable[str]) -> str:
    """Join words as in `a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


# ---- what a settings class declares


def declared(kind: Any) -> tuple[Declared, ...]:
    """Return all settings of a settings class and of the tables inside it, but not of arrays of tables."""
    return _declared(kind, ())


@functools.cache
def _declared(kind: Any, path: tuple[str, ...]) -> tuple[Declared, ...]:
    hints = get_type_hints(kind)
    found: list[Declared] = []
    for field in dataclasses.fields(kind):
        shape = _shape(hints[field.name])
        if _KEY in field.metadata:
            found.append(Declared((*path, field.name), field.metadata[_KEY], shape, field.default))
        elif shape.is_table and not shape.is_list:
            found += _declared(shape.inner, (*path, field.name))
    return tuple(found)


def tables(kind: Any) -> dict[str, _FieldType]:
    """Return the tables and arrays of tables directly inside a settings class, by their names."""
    shapes = {name: _shape(hint) for name, hint in get_type_hints(kind).items()}
    return {name: shape for name, shape in shapes.items() if shape.is_table}


def _shape(hint: Any) -> _FieldType:
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    if get_origin(hint) is Literal:
        return _FieldType(str)
    if get_origin(hint) is tuple:
        return _FieldType(get_args(hint)[0], is_list=True)
    if get_origin(hint) is dict:
        return _FieldType(get_args(hint)[1], is_map=True)
    return _FieldType(hint)


def check_settings(settings: Any, at: str) -> None:
    """Raise ConfigError if a value is outside the range that its setting declares. `at` is the table for error messages."""
    for one in declared(type(settings)):
        if len(one.path) > 1:
            continue  # the inner table has checked itself
        value = getattr(settings, one.path[0])
        many = value if isinstance(value, tuple) else () if isinstance(value, dict) else (value,)
        for item in many:
            if item is not None and not one.allows(item):
                raise one._refused(f"{at}.{one.key}" if at else one.key, item)


# ---- TOML


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raise ConfigError, which names the file, if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # ValueError: bad TOML, bad UTF-8, or a number with too many digits
        raise ConfigError(f"{path}: not TOML: {error}") from error


def from_table(kind: type[T], table: Any, at: str = "") -> T:
    """Convert a TOML table into a settings class. `at` is the table's name, with which error messages begin."""
    if not isinstance(table, dict):
        raise ConfigError(f"{_shown(at, table)}: write a table, [{at}]")
    own = {one.path[0]: one for one in declared(kind) if len(one.path) == 1}
    inner = tables(kind)
    values: dict[str, Any] = {}
    for name, value in table.items():
        where = f"{at}.{name}" if at else name
        if name in own:
            values[name] = own[name].convert(value, where)
        elif name in inner:
            values[name] = _from_tables(inner[name], value, where)
        elif name in getattr(kind, "REMOVED", ()):
            raise ConfigError(f"{where}: this setting was removed; delete it from the configuration")
        elif renamed := getattr(kind, "RENAMED", {}).get(name):
            raise ConfigError(f"{where} was renamed: write {renamed}")
        else:
            raise unknown_key(name, own.values(), inner, at)
    if missing := [name for name, one in own.items() if one.is_required and name not in values]:
        raise ConfigError(f"{at}.{missing[0]} is missing: give {own[missing[0]].values}".removeprefix("."))
    return kind(**values)


def _from_tables(shape: _FieldType, value: Any, at: str) -> Any:
    if not shape.is_list:
        return from_table(shape.inner, value, at)
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{_shown(at, value)}: write an array of tables, [[{at}]]")
    return tuple(from_table(shape.inner, one, f"{at}[{number}]") for number, one in enumerate(value))


def unknown_key(name: str, settings: Iterable[Declared], others: Iterable[str] = (), at: str = "") -> ConfigError:
    """Return the error for a key that does not exist. It names the nearest existing one."""
    return no_such_name(name, [*(one.path[-1] for one in settings), *others], at)


def no_such_name(name: str, known: Iterable[str], at: str = "", what: str = "setting") -> ConfigError:
    """Return the error for a name that is not in `known`. It suggests the nearest known name, or lists all of them."""
    prefix = f"{at}." if at else ""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"choose one of: {', '.join(names)}"
    return ConfigError(f"{prefix}{name}: no such {what}; {hint}")


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two TOML tables. Tables are merged, lists are joined, any other value of `above` replaces that of `below`."""
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            result[name] = merged(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            result[name] = [*old, *value]
        else:
            result[name] = value
    return result


def put(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set the value at a path of nested tables. Missing tables are created."""
    for name in path[:-1]:
        table = table.setdefault(name, {})
    table[path[-1]] = value
