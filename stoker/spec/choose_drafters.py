"""Builds the drafting that the setting `--drafter` names."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker.base.errors import ConfigError
from stoker.sched.drafting import Drafting, NoDrafting
from stoker.spec.draft_counts import DraftCounts
from stoker.spec.drafter import DRAFTERS, DrafterParts, build_drafter
from stoker.spec.tape_drafting import GRAMMAR, TapeDrafting

OFF, AUTO = "off", "auto"
# Draft models, which guess on the device (engine/device_drafter.py): a head in a folder, and a layer of the model's own files.
EAGLE3, MTP = "eagle3", "mtp"
_DRAFT_MODELS = (EAGLE3, MTP)
# The order in which drafters are called while their guesses were right equally often.
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
            if name != AUTO and name not in _DRAFT_MODELS and name not in DRAFTERS:
                known = ", ".join([OFF, AUTO, *_DRAFT_MODELS, *DRAFTERS])
                raise ConfigError(f"--drafter {setting}: there is no drafter {name!r}; available: {known}")
            if name == EAGLE3 and not argument:
                raise ConfigError(f"--drafter {setting}: {EAGLE3!r} needs its folder; write --drafter {EAGLE3}:FOLDER")
            if name in (AUTO, MTP) and argument:
                raise ConfigError(f"--drafter {setting}: {name!r} takes no argument; write --drafter {name}")
            if twice := [one for one in names if one in arguments]:
                raise ConfigError(f"--drafter {setting}: the drafter {twice[0]!r} is named twice; name it once")
            arguments |= dict.fromkeys(names, argument)
        if set(_DRAFT_MODELS) <= set(arguments):
            raise ConfigError(f"--drafter {setting}: an engine has one draft model; name {EAGLE3!r} or {MTP!r}")
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
        """The name of the draft model, if there is one."""
        return next((name for name in _DRAFT_MODELS if name in self.arguments), None)

    def build(self, parts: DrafterParts, counts: DraftCounts) -> Drafting:
        """Return the drafting. What it verifies is counted in `counts`. Raises ConfigError for a wrong argument."""
        if not self.is_on:
            return NoDrafting()
        drafters = {
            name: build_drafter(name, replace(parts, argument=argument))
            for name, argument in self.arguments.items()
            if name not in _DRAFT_MODELS
        }
        return TapeDrafting(drafters, counts, self.draft_model)
