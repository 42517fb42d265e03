from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from stoker.base.errors import ConfigError
from stoker.cli.main import main
from stoker.cli.metrics import gateway_families, worker_families
from stoker.observe.alerts import RULES, alert_rules
from stoker.observe.grafana import dashboard
from stoker.observe.metric_catalog import MetricFamily, check_expressions, read_families

ROOT = Path(__file__).parents[2]
OBSERVABILITY = ROOT / "deploy" / "observability"


@pytest.mark.parametrize(
    ("argv", "path"),
    [
        ([], ROOT / "docs" / "metrics.md"),
        (["--grafana"], OBSERVABILITY / "grafana-dashboard.json"),
        (["--alerts"], OBSERVABILITY / "prometheus-alerts.yaml"),
    ],
)
def test_the_generated_files_are_up_to_date(argv: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", *argv]) == 0
    assert capsys.readouterr().out == path.read_text(), f"run: stoker metrics {' '.join(argv)} > {path}"


def test_each_metric_has_a_panel() -> None:
    families = [*gateway_families(), *worker_families()]
    page = json.loads(dashboard(families))
    panels = [panel for row in page["panels"] for panel in (row, *row.get("panels", ()))]
    assert len({panel["id"] for panel in panels}) == len(panels)
    shown = " ".join(target["expr"] for panel in panels for target in panel.get("targets", ()))
    assert all(any(series in shown for series in family.series) for family in families)


def test_every_metric_has_a_help_text_and_one_meaning() -> None:
    families = [*gateway_families(), *worker_families()]
    assert all(family.help for family in families)
    assert len({family.name for family in families}) == len(families)


def test_a_metric_that_does_not_exist_is_named() -> None:
    families = [family for family in gateway_families() if family.name != "stoker_gateway_store_up"]
    with pytest.raises(ConfigError, match="stoker_gateway_store_up"):
        alert_rules([*families, *worker_families()])
    with pytest.raises(ConfigError, match="stoker_b_seconds_total"):
        check_expressions(["rate(stoker_b_seconds_total[5m])"], [MetricFamily("stoker_b_seconds", "histogram", "")])


def test_families_are_read_from_a_page() -> None:
    page = "# HELP stoker_a_total Things\n# TYPE stoker_a_total counter\nstoker_a_total 3\n# TYPE python_info gauge\n"
    assert read_families(page) == [MetricFamily("stoker_a_total", "counter", "Things")]


def test_each_alert_says_what_to_do() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.summary.endswith(".") and rule.action.endswith(".") for rule in RULES)


@pytest.mark.slow
def test_promtool_accepts_the_alerts() -> None:
    """Needs Prometheus on PATH (Debian: apt-get install prometheus)."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    path = OBSERVABILITY / "prometheus-alerts.yaml"
    checked = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"SUCCESS: {len(RULES)} rules found" in checked.stdout
