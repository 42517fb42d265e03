"""Settings out of a file of TOML tables: what is misspelt is refused, and every complaint names its field."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from stoker.base.errors import ConfigError
from stoker.base.paths import written_path


def read_tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def refuse_unknown(kind: Any, table: Any, at: str = "", source: str = "") -> None:
    """A misspelt name must not be taken for a default. `kind` is the dataclass that the table at `at` ("listen.") becomes;
    tables inside it are looked through too."""
    if not isinstance(table, dict):
        return
    hints = get_type_hints(kind)
    for name, value in table.items():
        if name not in hints:
            raise no_such_setting(name, sorted(hints), at, source)
        inner = next((one for one in (hints[name], *get_args(hints[name])) if dataclasses.is_dataclass(one)), None)
        if inner is None:
            continue
        for number, item in enumerate(value if isinstance(value, list) else [value]):
            index = f"[{number}]" if isinstance(value, list) else ""
            refuse_unknown(inner, item, f"{at}{name}{index}.", source)


def no_such_setting(
    name: str, known: Iterable[str], at: str = "", source: str = "", what: str = "setting"
) -> ConfigError:
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {at}{near[0]}?" if near else f"there are: {', '.join(names)}"
    return ConfigError(f"{source}{at}{name}: no such {what}; {hint}")


def in_words(wrong: object, at: str = "") -> str:
    """msgspec's "Expected `int`, got `str` - at `$.port`" of the table at `at` ("listen"), with the field in front."""
    text, _, place = str(wrong).partition(" - at `$")
    field = f"{at}{place.rstrip('`')}".removeprefix(".")
    return f"{field}: {text[:1].lower()}{text[1:]}" if field else text


def path_of(kind: type, value: Any) -> Any:
    """msgspec's dec_hook: a path is written as text."""
    if kind is Path and isinstance(value, str | Path):
        return written_path(value)
    raise TypeError(f"Expected a {kind.__name__}, got {value!r}")


def check_positive(at: str, settings: object, *names: str) -> None:
    """Those that are given."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{at}.{name}={value:g}: it must be above zero")
