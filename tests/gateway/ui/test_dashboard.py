"""The dashboard in a real browser. Slow, because it starts Chromium; skipped where that or its driver is not installed.

`pip install playwright axe-playwright-python`, and Chromium from the system (`apt-get install chromium`).
"""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from demo_fleet import ADMIN, HOSTILE, DemoFleet

pytest.importorskip("playwright")
axe_package = pytest.importorskip("axe_playwright_python")
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = ["now", "fleet", "kv", "requests", "sessions", "spend", "playground"]
WAIT_MS = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        # The sandbox needs rights that containers do not have.
        one = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoFleet]:
    with DemoFleet(tmp_path_factory.mktemp("fleet"), 3) as running:
        running.play(6, 3)
        yield running


class Seen(list[str]):
    """Errors of a page: messages of its console, exceptions, and requests to other addresses."""

    def watch(self, page: Page, url: str) -> None:
        page.on("console", lambda message: self.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith((url, "blob:")) else self.append(request.url))


def opened(browser: Browser, fleet: DemoFleet, seen: Seen, **options: Any) -> Page:
    page = browser.new_page(**options)
    page.set_default_timeout(WAIT_MS)
    seen.watch(page, fleet.url)
    page.goto(f"{fleet.url}/ui")
    page.fill("#token", ADMIN)
    page.keyboard.press("Enter")
    page.wait_for_selector("nav")
    return page


def admin(fleet: DemoFleet, method: str, path: str, body: str = "") -> Any:
    request = urllib.request.Request(f"{fleet.url}/admin/{path}", body.encode() or None, method=method)
    request.add_header("authorization", f"Bearer {ADMIN}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def show(page: Page, fleet: DemoFleet, name: str) -> None:
    page.goto(f"{fleet.url}/ui/#/{name}")
    page.wait_for_selector(f'nav a[href="#/{name}"][aria-current=page]')


def test_every_page_shows_the_fleet_without_errors(browser: Browser, fleet: DemoFleet) -> None:
    seen = Seen()
    page = opened(browser, fleet, seen)
    texts = {
        "now": "Time to the first token",
        "fleet": "Unified workers (3 of 3 ready)",
        "kv": "What more memory would have hit",
        "requests": "Latest requests",
        "sessions": "agent-0-helper",
        "spend": "default",
        "playground": "Ask the model something",
    }
    for name in PAGES:
        show(page, fleet, name)
        page.wait_for_selector(f"main :text({json.dumps(texts[name])})", state="attached")
    assert seen == []
    page.close()


def test_a_wrong_token_shows_nothing_and_says_so(browser: Browser, fleet: DemoFleet) -> None:
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{fleet.url}/ui/")
    page.fill("#token", "a-wrong-token-of-a-stranger")
    page.keyboard.press("Enter")
    page.wait_for_selector(".failure:text('admin token')")
    assert page.query_selector("nav") is None
    assert page.evaluate("sessionStorage.length") == 0
    page.close()


def test_the_numbers_follow_the_traffic(browser: Browser, fleet: DemoFleet) -> None:
    seen = Seen()
    page = opened(browser, fleet, seen)
    before = len(fleet.gateway.gateway._parts.insight.requests(1000))  # type: ignore[attr-defined]
    fleet.play(2, 2)
    page.wait_for_selector(".plot-box canvas")
    show(page, fleet, "requests")
    page.wait_for_function(
        "count => document.querySelectorAll('tbody tr').length >= Math.min(count, 100)", arg=before + 4
    )
    page.click("tbody tr >> nth=0 >> button.link")
    page.wait_for_selector("text=Why this worker")
    page.wait_for_selector(".fall-name:text('prefill')")
    page.wait_for_selector(".badge:text('chosen')")
    assert seen == []
    page.close()


def test_an_action_asks_first(browser: Browser, fleet: DemoFleet) -> None:
    seen = Seen()
    page = opened(browser, fleet, seen)
    show(page, fleet, "fleet")
    drain = page.locator("tbody tr").first.get_by_role("button", name="Drain")
    worker = page.locator("tbody tr .name").first.inner_text()
    member = next(one for one in fleet.gateway.fleet.members() if one.worker_id == worker)
    drain.click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("dialog")).to_have_count(0)
    assert not member.health.draining
    drain.click()
    page.locator("dialog .primary").click()
    page.wait_for_selector(".badge:text('draining')")
    assert member.health.draining
    page.locator("tbody tr", has_text=worker).get_by_role("button", name="End drain").click()
    page.locator("dialog .primary").click()
    page.wait_for_selector("h2:text('3 of 3 ready')")
    assert seen == []
    page.close()


def test_roles_change_and_requests_move_only_where_the_gateway_can(browser: Browser, fleet: DemoFleet) -> None:
    """A gateway names the changes that it can make. One that can change roles can move requests, too."""
    page = opened(browser, fleet, Seen())
    show(page, fleet, "fleet")
    member = fleet.gateway.fleet.members()[0]
    row = page.locator("tbody tr", has_text=str(member.worker_id))
    row.locator("summary").click()
    assert "Move away" in row.locator("button").all_inner_texts()
    row.get_by_role("button", name="Make decode").click()
    page.locator("dialog .primary").click()
    page.wait_for_selector("h2:text('Decode workers (1 of 1 ready)')")
    assert member.spec.role.value == "decode"
    row.locator("summary").click()
    row.get_by_role("button", name="Make unified").click()
    page.locator("dialog .primary").click()
    page.wait_for_selector("h2:text('Unified workers (3 of 3 ready)')")
    page.close()
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    status = {"version": "x", "processes": 1, "changes": ["/admin/drain", "/admin/undrain"]}
    page.route("**/admin/status", lambda route: route.fulfill(json=status))
    page.goto(f"{fleet.url}/ui/#/fleet")
    page.fill("#token", ADMIN)
    page.keyboard.press("Enter")
    page.wait_for_selector("tbody button")
    assert set(page.locator("tbody button").all_inner_texts()) == {"Drain"}
    page.close()


@contextmanager
def followed(fleet: DemoFleet) -> Iterator[None]:
    """Ask for upgrades all the time, as `stoker up` does."""
    stopping = threading.Event()

    def follow() -> None:
        while not stopping.wait(0.5):
            admin(fleet, "GET", "upgrade?follows=1")

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        yield
    finally:
        stopping.set()
        follower.join()


def test_an_upgrade_is_offered_where_something_carries_it_out(browser: Browser, fleet: DemoFleet) -> None:
    seen = Seen()
    page = opened(browser, fleet, seen)
    show(page, fleet, "fleet")
    page.wait_for_selector("tbody button")
    everything = page.get_by_role("button", name="Upgrade all workers")
    assert everything.count() == 0
    with followed(fleet):
        everything.click()
        page.locator("dialog .primary").click()
        expect(page.locator("dialog")).to_have_count(0)
        wished = admin(fleet, "GET", "upgrade")
        assert (wished["number"], wished["workers"]) == (1, [])
        admin(fleet, "POST", "upgrade/hold?holder=cli&line=w0%3A+empty%2C+restarting")
        page.wait_for_selector(".badge:text('running')")
        page.wait_for_selector("li:text('w0: empty, restarting')")
        expect(everything).to_have_count(0)
        admin(fleet, "POST", "upgrade/release?holder=cli&outcome=stopped%3A+w0+does+not+get+ready")
        page.wait_for_selector("p:has-text('stopped: w0 does not get ready')")
        worker = page.locator("tbody tr .name").first.inner_text()
        page.locator("tbody tr").first.locator("summary").click()
        page.get_by_role("button", name=f"Upgrade {worker}").click()
        page.locator("dialog .primary").click()
        expect(page.locator("dialog")).to_have_count(0)
        assert admin(fleet, "GET", "upgrade")["workers"] == [worker]
    assert seen == []
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_their_screen_and_have_no_serious_accessibility_findings(
    browser: Browser, fleet: DemoFleet, theme: str, width: int
) -> None:
    seen = Seen()
    page = opened(browser, fleet, seen, viewport={"width": width, "height": 850}, color_scheme=theme)
    axe = (Path(str(axe_package.__file__)).parent / "axe.min.js").read_text(encoding="utf-8")
    page.evaluate(axe)
    for name in PAGES:
        show(page, fleet, name)
        page.wait_for_selector(".panel, .tile")
        page.wait_for_selector("text=/Reading/", state="detached")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [
            (one["id"], [node["target"] for node in one["nodes"]][:3])
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], (name, theme, width)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(18, 22, 28)") == (theme == "dark")
    assert seen == []
    page.close()


def test_the_keyboard_reaches_everything(browser: Browser, fleet: DemoFleet) -> None:
    page = opened(browser, fleet, Seen())
    show(page, fleet, "fleet")
    page.wait_for_selector("tbody button")
    reached: set[str] = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.innerText || document.activeElement.getAttribute('aria-label') || ''")
        )
    assert {"Now", "Playground", "Sign out", "Drain"} <= reached
    page.close()


def test_the_playground_shows_an_answer_with_its_numbers(browser: Browser, fleet: DemoFleet) -> None:
    seen = Seen()
    page = opened(browser, fleet, seen)
    show(page, fleet, "playground")
    page.wait_for_selector("select option", state="attached")
    page.fill("#question", "What is the capital of France?")
    page.click("text=Send")
    page.wait_for_selector(".message.assistant p:has-text('word word')")
    page.wait_for_selector(".tile-more:text('9 of 12 drafted tokens accepted')")
    page.wait_for_selector("text=Why this worker")
    assert seen == []
    page.close()


def test_what_clients_send_is_never_run(browser: Browser, tmp_path: Path) -> None:
    """Names of models and workers, sessions, request ids and answers are text, whatever they contain."""
    with DemoFleet(tmp_path, 1, models=(HOSTILE,)) as hostile:
        admin(hostile, "POST", "workers", json.dumps({"url": f"http://127.0.0.1:9/{HOSTILE}"}))
        hostile.play(2, 1, stop=HOSTILE, max_tokens=3)
        seen = Seen()
        page = opened(browser, hostile, seen)
        for name in PAGES:
            show(page, hostile, name)
            page.wait_for_selector("text=/Reading/", state="detached")
            if name in ("fleet", "requests", "sessions"):
                page.wait_for_selector(f"tbody :text({json.dumps(HOSTILE)})")
            if name == "fleet":
                page.wait_for_selector(f"tbody .name:text({json.dumps('127.0.0.1:9/' + HOSTILE)})")
        page.wait_for_selector("select option", state="attached")
        page.fill("#question", HOSTILE)
        page.click("text=Send")
        page.wait_for_selector("text=Why this worker")
        assert page.locator(".message.user p").inner_text() == HOSTILE
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script").count() == 0
        assert seen == []
        page.close()


def test_a_fleet_of_64_workers_and_one_of_none(browser: Browser, tmp_path: Path) -> None:
    with DemoFleet(tmp_path, 64) as large:
        seen = Seen()
        page = opened(browser, large, seen, viewport={"width": 1280, "height": 800})
        show(page, large, "fleet")
        page.wait_for_selector("h2:text('Unified workers (64 of 64 ready)')")
        assert page.locator("tbody tr").count() == 64
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        assert seen == []
        page.close()
    (tmp_path / "empty").mkdir()
    with DemoFleet(tmp_path / "empty", 0) as empty:
        seen = Seen()
        page = opened(browser, empty, seen)
        page.wait_for_selector("text=No worker is connected")
        for name in PAGES:
            show(page, empty, name)
            page.wait_for_selector("text=/Reading/", state="detached")
            page.wait_for_selector(".empty, .tile")
        assert seen == []
        page.close()
