"""docs/settings.md is the output of `stoker settings`, and has every setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.base.settings import declared, tables
from stoker.cli.main import main
from stoker.cli.serve_settings import ServeSettings
from stoker.cli.settings import reference
from stoker.gateway.config import GatewayConfig
from stoker.train.train_settings import TrainSettings
from stoker.up.config import FleetStore, UpConfig, WorkersConfig

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(encoding="utf-8"), "run: stoker settings > docs/settings.md"


def test_the_page_has_every_setting() -> None:
    page = reference()
    names = [one.flag for kind in (ServeSettings, TrainSettings) for one in declared(kind)]
    names += [one.key for one in declared(GatewayConfig)]
    names += [one.setting.flag for one in declared(GatewayConfig) if one.setting.flag]
    names += [one.key for kind in (FleetStore, UpConfig, WorkersConfig) for one in declared(kind)]
    names += [one.key for shape in tables(GatewayConfig).values() if shape.is_list for one in declared(shape.inner)]
    assert [name for name in names if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("kind", [ServeSettings, TrainSettings, GatewayConfig, FleetStore, UpConfig, WorkersConfig])
def test_every_help_text_is_a_sentence(kind: type) -> None:
    wrong = [one.key for one in declared(kind) if not one.setting.help.endswith(".")]
    assert wrong == []


def test_no_two_settings_of_a_command_have_the_same_flag() -> None:
    for kind in (ServeSettings, TrainSettings, GatewayConfig):
        flags = [one.flag for one in declared(kind) if one.setting.flag]
        assert len(flags) == len(set(flags))
