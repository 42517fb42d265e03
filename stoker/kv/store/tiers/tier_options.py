"""Options of a tier that has no settings of its own in `StoreSettings`: texts of the form `NAME[,KEY=VALUE...]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker.base.errors import ConfigError


class TierOptions:
    """The options of one tier. The tier reads each option with its type and default; options that it never read are errors."""

    def __init__(self, tier: str, values: Mapping[str, str]) -> None:
        self._tier = tier
        self._values = values
        self._used: set[str] = set()

    def text(self, key: str, default: str = "") -> str:
        self._used.add(key)
        return self._values.get(key, default)

    def number(self, key: str, default: float) -> float:
        self._used.add(key)
        try:
            return float(self._values.get(key, default))
        except ValueError:
            raise ConfigError(
                f"--kv-tier {self._tier!r}: {key}={self._values[key]!r} is not a number; write {key}={default:g}"
            ) from None

    def check_all_used(self) -> None:
        unknown = sorted(set(self._values) - self._used)
        if unknown:
            known = ", ".join(sorted(self._used)) or "none"
            raise ConfigError(f"--kv-tier {self._tier!r} has no option {unknown[0]!r}; its options are: {known}")


def parse_tier_options(tiers: Sequence[str]) -> dict[str, TierOptions]:
    """Parse texts of the form `NAME[,KEY=VALUE...]` into options by tier name."""
    parsed: dict[str, TierOptions] = {}
    for text in tiers:
        name, *pairs = text.split(",")
        values = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not key or not equals:
                raise ConfigError(f"--kv-tier {text!r}: {pair!r} is not KEY=VALUE; write NAME,KEY=VALUE,...")
            values[key] = value
        if name in parsed:
            raise ConfigError(f"--kv-tier names {name!r} twice; write all its options behind one name")
        parsed[name] = TierOptions(name, values)
    return parsed
