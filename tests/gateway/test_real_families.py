"""Hand-off and resume with the attention of extra-large models, through a gateway and real workers.

A prefill worker hands each prompt to one of two decode workers. That one is killed in the middle of its answer, and the client
gets the tokens of a worker that computes everything alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_fleet import RealFleet, real_fleet
from tiny import make_tiny
from worker.real import TOKENIZER_FILES, wait_for

pytestmark = pytest.mark.slow

PULLED = "stoker_kv_pulled_tokens_total"
# The window of gpt-oss has 16 tokens and the chunk of Llama 4 has 32: the prompt is longer than both.
PROMPT = " ".join(f"{number} river stone lamp garden" for number in range(12))
KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"seed": 11, "temperature": 1.0},
    "greedy": {"temperature": 0},
    "three": {"seed": 13, "n": 3},
}


@pytest.fixture(scope="module", params=["deepseek", "llama4-scout", "gpt-oss"])
def fleet(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealFleet]:
    folder, work = tmp_path_factory.mktemp(request.param), tmp_path_factory.mktemp("fleet")
    tokenizer = json.loads((smollm2 / "config.json").read_text())
    special = {name: tokenizer[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in tokenizer}
    make_tiny(folder, request.param, torch.float32, vocab_size=tokenizer["vocab_size"], **special)
    for name in TOKENIZER_FILES:
        shutil.copy(smollm2 / name, folder / name)
    with real_fleet(folder, work, roles=("prefill", "decode", "decode"), lease_s=30.0) as fleet:
        yield fleet
    assert not [path.name for path in work.glob("*.log") if "Traceback" in path.read_text()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_decode_worker_does_not_change_the_answer(fleet: RealFleet, kind: str) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"{kind} {PROMPT}"}],
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | KINDS[kind]
    undisturbed = fleet.direct(body)
    undisturbed.wait()
    before = {worker.port: worker.metrics()[PULLED] for worker in fleet.workers}
    exchange = fleet.ask(body)
    wait_for(lambda: len(exchange.events) > 40 or exchange.is_over)
    assert not exchange.is_over, (exchange.status, exchange.answer)
    prefill, decode = fleet.last_route()
    assert prefill is not None, "the prompt was not handed off"
    wait_for(lambda: decode.metrics()[PULLED] > before[decode.port] or exchange.is_over)
    assert not exchange.is_over, "nothing was pulled"
    decode.kill()
    exchange.wait()
    assert exchange.said == undisturbed.said
    fleet.heal()
    fleet.settle(60)
