"""Recorded agent chats, turn by turn, through the gateway to real workers: repeats hit, counts equal the workers'."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from real_fleet import RealFleet, real_fleet
from worker.real import wait_for

BLOCK_TOKENS = 16  # a CPU worker's


@dataclass(frozen=True)
class Turn:
    request_id: str
    prompt_tokens: int
    cached_tokens: int


def chats(data_dir: Path, num: int) -> list[list[dict[str, Any]]]:
    with gzip.open(data_dir / "agentic" / "mint_gpt4.jsonl.gz", "rt") as lines:
        found = [json.loads(line)["messages"] for line in lines]
    return [chat for chat in found if sum(message["role"] == "user" for message in chat) > 1][:num]


def play(fleet: RealFleet, number: int, chat: list[dict[str, Any]], model: str, header: bool) -> list[Turn]:
    """Every user turn with the whole conversation before it, as agents send it."""
    turns = []
    for end, message in enumerate(chat):
        if message["role"] != "user":
            continue
        request_id = f"chat-{number}-{end}"
        body = {"model": model, "messages": chat[: end + 1], "max_tokens": 2, "temperature": 0, "stream": bool(end % 4)}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        headers = {"X_Request_Id": request_id} | ({"X_Session_Affinity": f"chat-{number}"} if header else {})
        exchange = fleet.ask(body, **headers)
        exchange.wait(300)
        usage = exchange.usage
        turns.append(Turn(request_id, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    return turns


def worker_counts(fleet: RealFleet) -> dict[str, tuple[int, int]]:
    """The workers' own log lines, by request id."""
    found = {}
    for worker in fleet.workers:
        for line in worker.log_path.read_text().splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("event") == "request" and "prompt_tokens" in entry:
                found[entry["request"]] = (entry["prompt_tokens"], entry["cached_tokens"])
    return found


def check(fleet: RealFleet, data_dir: Path, num: int, model: str, header: bool) -> None:
    recorded = chats(data_dir, num)
    assert len(recorded) == num
    with ThreadPoolExecutor(4) as threads:
        played = list(threads.map(lambda pair: play(fleet, pair[0], pair[1], model, header), enumerate(recorded)))
    turns = [turn for chat in played for turn in chat]
    wait_for(lambda: len(worker_counts(fleet)) >= len(turns))
    counted = worker_counts(fleet)
    assert {turn.request_id: (turn.prompt_tokens, turn.cached_tokens) for turn in turns} == {
        request_id: counts for request_id, counts in counted.items() if request_id.startswith("chat-")
    }
    missed = []
    for chat in played:
        for before, now in pairwise(chat):
            # The previous turn is a prefix of this one. For balance, a chat may move to a worker that lacks a part of it.
            wanted = before.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
            if now.cached_tokens < 0.9 * wanted:
                missed.append((now, wanted))
    assert missed == []
    print(
        f"{num} chats, {len(turns)} requests, {sum(turn.prompt_tokens for turn in turns)} prompt tokens, "
        f"{sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns):.1%} cached"
    )


@pytest.fixture(scope="module")
def fleet(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with real_fleet(tiny_folder, tmp_path_factory.mktemp("fleet"), worker_options=("--kv-blocks", "40000")) as fleet:
        yield fleet


@pytest.mark.parametrize("header", [False, True], ids=["no header", "x-session-affinity"])
def test_the_first_repeat_hits_and_counts_are_the_workers_own(fleet: RealFleet, data_dir: Path, header: bool) -> None:
    for worker in fleet.workers:
        worker.log_path.write_text("")
    check(fleet, data_dir, 12, "tiny", header)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # ten minutes on two idle cores
def test_two_hundred_chats_with_a_real_model(smollm2: Path, data_dir: Path, tmp_path: Path) -> None:
    with real_fleet(smollm2, tmp_path, worker_options=("--dtype", "float32", "--kv-blocks", "12000")) as fleet:
        check(fleet, data_dir, 200, "tiny", header=False)
