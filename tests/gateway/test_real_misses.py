"""The cache doctor with real workers: the causes that can be brought about there are named, and every row adds up."""

from __future__ import annotations

import random
import re
import sqlite3
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from real_fleet import ADMIN_TOKEN, RealFleet, real_fleet
from worker.real import STOKER, wait_for

DEBUG = {"X_Stoker_Debug": "cache"}
SYSTEM = {"role": "system", "content": "You are an agent that reads and writes files. " * 10}
_PART = re.compile(r"(\w+)(?:\[([^\]]*)\])?=(\d+)")


@pytest.fixture(scope="module")
def fleet(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    # 400 blocks of 16 tokens hold a few conversations.
    work = tmp_path_factory.mktemp("misses")
    with real_fleet(tiny_folder, work, 1, worker_options=["--kv-blocks", "400"]) as fleet:
        yield fleet


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def read_report(text: str) -> tuple[int, int, dict[tuple[str, str], int]]:
    """Return prompt, cached and the parts of a report, which must add up."""
    found = {(reason, place): int(tokens) for reason, place, tokens in _PART.findall(text)}
    prompt, cached = found.pop(("prompt", "")), found.pop(("cached", ""))
    assert sum(found.values()) == prompt - cached, text
    return prompt, cached, found


def ask(fleet: RealFleet, messages: list[Any], **more: Any) -> dict[tuple[str, str], int]:
    """Send a request, streamed or not, and return the report that the client got."""
    stream = bool(more.get("stream"))
    options = {"stream_options": {"include_usage": True}} if stream else {}
    exchange = fleet.ask({"messages": messages, "max_tokens": 2, "temperature": 0, **options, **more}, **DEBUG)
    exchange.wait(120)
    assert exchange.status == 200, exchange.answer
    if stream:
        [text] = re.findall(r"^: x-stoker-cache: (.*)$", exchange.answer.decode(), re.MULTILINE)
        assert exchange.events[-1] == "[DONE]"
    else:
        text = exchange.answer_headers["x-stoker-cache"]
    prompt, cached, parts = read_report(text)
    usage = exchange.usage
    assert (prompt, cached) == (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
    return parts


def largest(parts: dict[tuple[str, str], int]) -> tuple[str, str]:
    return max(parts, key=lambda part: parts[part])


def grown(first: str) -> tuple[list[Any], list[Any]]:
    """A conversation and its next turn."""
    start = [SYSTEM, user(first * 24)]
    return start, [*start, {"role": "assistant", "content": "Yes."}, user("And what is in the other file? " * 12)]


@pytest.mark.parametrize("stream", [False, True])
def test_first_turns_and_new_text_are_named(fleet: RealFleet, stream: bool) -> None:
    start, more = grown(f"Read the first file, stream {stream}. ")
    assert largest(ask(fleet, start, stream=stream)) == ("first_turn", "")
    assert largest(ask(fleet, more, stream=stream)) == ("new", "")


def test_a_changed_system_prompt_is_named(fleet: RealFleet) -> None:
    start, more = grown("Read the file with the date. ")
    ask(fleet, start)
    other = {"role": "system", "content": "It is 9 o'clock. " + SYSTEM["content"]}
    assert largest(ask(fleet, [other, *more[1:]])) == ("changed", "message 0")


def test_another_salt_is_named(fleet: RealFleet) -> None:
    start, more = grown("Read the file with the salt. ")
    ask(fleet, start, cache_salt="one")
    assert largest(ask(fleet, more, cache_salt="two")) == ("salted", "")


def test_evicted_prompts_are_named(fleet: RealFleet) -> None:
    start, more = grown("Read the file that will be evicted. ")
    ask(fleet, start)
    for number in range(14):
        ask(fleet, [user(f"{number} {'fills the cache of the worker ' * 130}")])
    found = ask(fleet, more)
    assert largest(found)[0] == "evicted", found


def test_a_lost_engine_is_named(fleet: RealFleet) -> None:
    start, more = grown("Read the file before the restart. ")
    ask(fleet, start)
    [worker] = fleet.workers
    worker.kill_engine()
    wait_for(lambda: not worker.is_ready, 30)
    fleet.settle(120)
    fleet.heal()
    found = ask(fleet, more)
    assert largest(found)[0] == "restarted", found


def test_every_row_of_a_soak_adds_up_and_the_command_shows_the_same(fleet: RealFleet) -> None:
    rng = random.Random(3)

    def play(number: int) -> None:
        own = random.Random(number)
        messages: list[Any] = [SYSTEM, user(f"Conversation {number}. " * own.randrange(1, 30))]
        for turn in range(5):
            ask(fleet, messages, stream=own.random() < 0.5, user=f"agent {number}" if number % 2 else None)
            messages = [
                *messages,
                {"role": "assistant", "content": "No."},
                user(f"Turn {turn}. " * own.randrange(1, 40)),
            ]
            if own.random() < 0.2:
                messages[1] = user("rewritten")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(play, rng.sample(range(100), 8)))
    with closing(sqlite3.connect(f"file:{fleet.ledger_path}?mode=ro", uri=True)) as ledger:
        query = "SELECT prompt_tokens, cached_tokens, misses FROM usage WHERE status = 200"
        wait_for(lambda: fleet.gateway.metrics()["stoker_gateway_ledger_pending_rows"] == 0)
        rows = ledger.execute(query).fetchall()
    assert len(rows) >= 40
    for prompt, cached, misses in rows:
        assert sum(int(tokens) for _, _, tokens in _PART.findall(misses)) == prompt - cached, misses
    found = fleet.gateway.get("/admin/misses", ADMIN_TOKEN)
    [key] = found["keys"]
    assert sum(one["tokens"] for one in key["reasons"]) == sum(prompt - cached for prompt, cached, _ in rows)
    command = [
        STOKER,
        "misses",
        "--url",
        fleet.gateway.url,
        "--admin-token-file",
        str(fleet.ledger_path.with_name("admin-token")),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "first_turn" in shown
    assert f"{key['requests']} requests" in shown
