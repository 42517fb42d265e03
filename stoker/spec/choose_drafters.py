"""Builds the drafting that the setting `--drafter` names."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker.base.errors import ConfigError
from stoker.sched.drafting import Drafting, NoDrafting
from stoker.spec.draft_counts import DraftCounts
from stoker.spec.drafter import DRAFTERS, DrafterParts, build_drafter
from stoker.spec.tape_drafting import GRAMMAR, TapeDrafting

OFF, AUTO = "off", "auto"
EAGLE3 = "eagle3"  # a draft model, which guesses on the device (engine/device_drafter.py)
# In the order in which they are asked while none was right more often than another.
_AUTO_DRAFTERS = ("prediction", "cache", "suffix", "ngram", GRAMMAR)


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """The drafters of one engine, each with its argument."""

    arguments: dict[str, str]

    @classmethod
    def parse(cls, setting: str) -> DrafterChoice:
        """Read `off`, or names with optional arguments: `NAME[:ARGUMENT][,NAME...]`. `auto` stands for several names.
        Raises ConfigError."""
        if setting == OFF:
            return cls({})
        arguments: dict[str, str] = {}
        for part in setting.split(","):
            name, _, argument = part.strip().partition(":")
            names = _AUTO_DRAFTERS if name == AUTO else (name,)
            if name != AUTO and name not in (GRAMMAR, EAGLE3) and name not in DRAFTERS:
                known = ", ".join([OFF, AUTO, EAGLE3, GRAMMAR, *DRAFTERS])
                raise ConfigError(f"--drafter {setting}: there is no drafter {name!r}; available: {known}")
            if name == EAGLE3 and not argument:
                raise ConfigError(f"--drafter {setting}: {EAGLE3!r} needs its folder; write --drafter {EAGLE3}:FOLDER")
            if name in (AUTO, GRAMMAR) and argument:
                raise ConfigError(f"--drafter {setting}: {name!r} takes no argument; write --drafter {name}")
            if twice := [one for one in names if one in arguments]:
                raise ConfigError(f"--drafter {setting}: the drafter {twice[0]!r} is named twice; name it once")
            arguments |= dict.fromkeys(names, argument)
        return cls(arguments)

    @property
    def is_on(self) -> bool:
        return bool(self.arguments)

    @property
    def drafts_grammar(self) -> bool:
        """True if the runner returns what grammars force."""
        return GRAMMAR in self.arguments

    @property
    def draft_model(self) -> str | None:
        """The folder of the draft model, if there is one."""
        return self.arguments.get(EAGLE3)

    def build(self, parts: DrafterParts, counts: DraftCounts) -> Drafting:
        """Return the drafting. What it verifies is counted in `counts`. Raises ConfigError for a wrong argument."""
        if not self.is_on:
            return NoDrafting()
        drafters = {
            name: build_drafter(name, replace(parts, argument=argument))
            for name, argument in self.arguments.items()
            if name not in (GRAMMAR, EAGLE3)
        }
        return TapeDrafting(drafters, counts, EAGLE3 if self.draft_model is not None else None)
