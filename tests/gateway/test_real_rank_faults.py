"""Workers with several ranks behind the gateway: a rank is killed or stopped at any moment, and the client gets its answer."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from real_fleet import Process, real_fleet
from worker.real import children, is_alive, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # slow: a fleet with up to 13 processes, and its restarts
ROUNDS = 10
PROMPT = "Tell me a long story about " + "rivers and stones and lamps and gardens and " * 20


def body(number: int) -> dict[str, Any]:
    """A prompt of its own, so that no worker has its KV."""
    messages = [{"role": "user", "content": f"{number}: {PROMPT}"}]
    return {"messages": messages, "max_tokens": 120, "ignore_eos": True, "temperature": 0.8, "seed": 5, "stream": True}


def ranks_of(worker: Process) -> list[int]:
    """Return the processes of a worker's ranks, with that of rank 0."""
    assert worker.process is not None
    engines = children(worker.process.pid)
    return [*engines, *(pid for engine in engines for pid in children(engine))]


def has_restarted(worker: Process, before: list[int]) -> bool:
    """Return True if a new engine has replaced all processes of the old one."""
    now = ranks_of(worker)
    return len(now) == 2 and not set(now) & set(before) and not any(map(is_alive, before))


@pytest.mark.parametrize("roles", [(), ("prefill", "decode", "decode")], ids=["unified", "pairs"])
def test_every_answer_survives_the_loss_of_a_rank(tiny_folder: Path, tmp_path: Path, roles: tuple[str, ...]) -> None:
    """With pairs, the rank is lost while KV is computed, handed off or decoded, on either side."""
    rng = random.Random(len(roles))
    with real_fleet(
        tiny_folder, tmp_path, worker_options=("--tp", "2", "--engine-silent-s", "8"), roles=roles
    ) as fleet:
        wanted = [fleet.direct(body(number)) for number in range(ROUNDS)]
        for number, expected in enumerate(wanted):
            expected.wait()
            asked = fleet.ask(body(100 + number) | {"messages": body(number)["messages"]})
            if number % 2:
                wait_for(lambda asked=asked: len(asked.events) > 3)
            else:
                time.sleep(rng.random() / 4)  # any moment will do
            worker = rng.choice(fleet.workers)
            before = ranks_of(worker)
            os.kill(rng.choice(before), rng.choice([signal.SIGKILL, signal.SIGSTOP]))
            asked.wait(120)
            assert asked.said == expected.said, number
            wait_for(lambda worker=worker, before=before: has_restarted(worker, before), 180)
            fleet.settle(120)
    assert not [path.name for path in tmp_path.glob("*.log") if "Traceback" in path.read_text()]
