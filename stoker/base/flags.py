"""Command-line flags from the declarations of settings."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from stoker.base.errors import ConfigError
from stoker.base.settings import Declared, put


class FlagParser(Protocol):
    """An argparse parser, or a group of one."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Any: ...


class _Refuse(argparse.Action):
    """An argparse action for a flag that does not exist any more: its use raises ConfigError with an explanation."""

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        raise ConfigError(str(self.const))


def add_flags(parser: FlagParser, settings: Iterable[Declared]) -> None:
    """Add a flag for each of `settings` that has one. A flag that is not given leaves None.

    A wrong value raises ConfigError during parsing, with a message that names the flag.
    """
    for one in settings:
        if one.setting.flag is None:
            continue
        if one.is_switch:
            parser.add_argument(
                one.flag, dest=one.flag_name, action="store_const", const=not one.default, help=_help(one)
            )
        else:
            parser.add_argument(
                one.flag,
                dest=one.flag_name,
                action="extend" if one.shape.is_list else "store",
                type=functools.partial(one.parse, name=one.flag),
                metavar=_metavar(one),
                help=_help(one),
            )
        for old in one.setting.renamed_from:
            refuse_flag(parser, old, f"{old} was renamed: use {one.flag}")


def refuse_flag(parser: FlagParser, flag: str, message: str) -> None:
    """Add a hidden flag. Its use raises ConfigError with `message`."""
    parser.add_argument(flag, action=_Refuse, nargs="?", const=message, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


def given_flags(args: argparse.Namespace, settings: Iterable[Declared]) -> dict[Declared, Any]:
    """Return the settings that were given on the command line, with their values."""
    with_flag = (one for one in settings if one.setting.flag is not None)
    return {one: value for one in with_flag if (value := getattr(args, one.flag_name, None)) is not None}


def as_table(values: Mapping[Declared, Any]) -> dict[str, Any]:
    """Nest values by their settings' paths: `{"listen": {"port": 8000}}`."""
    result: dict[str, Any] = {}
    for one, value in values.items():
        put(result, one.path, value)
    return result


def _help(one: Declared) -> str:
    text = one.setting.flag_help or one.setting.help
    if not one.is_switch and (default := one.default_words):
        text += f" Default: {default}."
    return text.replace("%", "%%")


def _metavar(one: Declared) -> str:
    if one.setting.metavar is not None:
        return one.setting.metavar
    if one.setting.choices:
        return "{" + ",".join(one.setting.choices) + "}"
    if one.shape.inner in (int, float):
        return one.setting.unit.upper() if one.setting.unit in ("s", "GiB", "MiB") else "N"
    return "NAME"
