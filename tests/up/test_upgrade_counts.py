"""`stoker upgrade` counts failed requests across restarts of the gateway's processes."""

from __future__ import annotations

import pytest

from stoker.cli.upgrade import _Control
from stoker.cli.upgrade_hold import UpgradeHold


class Pages:
    """An admin API that answers one page of metrics after the other."""

    def __init__(self, *pages: str) -> None:
        self.url = "http://gateway"
        self._pages = list(pages)

    def get(self, path: str) -> bytes:
        assert path == "/metrics"
        return self._pages.pop(0).encode()


def failed(**by_process: int) -> str:
    return "".join(
        f'stoker_gateway_requests_total{{model="m",status="500",process="{name[1:]}"}} {count}\n'
        f'stoker_gateway_requests_total{{model="m",status="200",process="{name[1:]}"}} 1000\n'
        f'stoker_gateway_worker_failures_total{{kind="lost",worker="a:1",process="{name[1:]}"}} {count}\n'
        f'stoker_gateway_worker_failures_total{{kind="busy",worker="a:1",process="{name[1:]}"}} 77\n'
        for name, count in by_process.items()
    )


@pytest.mark.parametrize("counted", [_Control.num_errors, lambda control: control.num_failures("a:1")])
def test_a_process_that_restarts_or_is_silent_changes_no_count(counted: object) -> None:
    pages = Pages(failed(p0=10, p1=5), failed(p0=10), failed(p0=10, p1=5), failed(p0=1, p1=5), failed(p0=2, p1=6))
    control = _Control(pages, UpgradeHold(pages, print))  # type: ignore[arg-type]
    assert [counted(control) for _ in range(5)] == [15, 15, 15, 16, 18]  # type: ignore[operator]
