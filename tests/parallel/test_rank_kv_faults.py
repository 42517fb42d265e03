"""A rank is killed or stopped while KV moves: one error that names it, or a recomputation, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.base.ids import RequestId
from stoker.engine.llm import LLM
from stoker.engine.ranks.rank_processes import RankProcesses
from stoker.kv.blocks.transfer import KvTicket
from stoker.parallel.rank_watch import RankLost
from stoker.sched.request import GenerateRequest
from tests.parallel.rank_cases import CHANGES
from tests.parallel.test_rank_kv import GREEDY, NEW_TOKENS, hand_over, prompts, request, settings, settle
from tests.parallel.test_rank_processes import is_running
from tests.tiny import make_tiny

pytestmark = pytest.mark.slow  # every test starts processes of ranks and waits for heartbeats that stop
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_tiny(folder, "llama", torch.float64, **CHANGES)
    return folder


def lost(llm: LLM, ranks: RankProcesses, number: signal.Signals) -> None:
    """Signal rank 1, and check that its loss is noticed in time."""
    os.kill(ranks.pids[1], number)
    lost_s = time.monotonic()
    with pytest.raises(RankLost, match="rank 1 is lost"):
        step_until(llm, lost_s + 60)
    assert time.monotonic() - lost_s < 10


def step_until(llm: LLM, give_up_s: float) -> None:
    while time.monotonic() < give_up_s:
        llm.built.engine.step()
        time.sleep(0.01)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize("number", SIGNALS)
def test_the_receiver_loses_a_rank_during_a_load(folder: Path, layout: str, number: signal.Signals) -> None:
    [prompt], ranks = prompts(1, [200]), RankProcesses()
    serving = replace(settings(serves=True), sched=replace(settings().sched, step_tokens=16))
    with closing(LLM(folder, serving)) as prefill:
        first, server = prefill.built.engine, prefill.built.server
        assert server is not None
        with closing(LLM(folder, settings(layout), ranks=ranks)) as decode:
            first.add(request(0, prompt, lease_id="l"))
            for _ in range(3):
                first.step()
            # Most of the prompt is not computed yet, so that the pull waits.
            ticket = KvTicket(server.engine_id, server.address, "l", len(prompt), 30.0)
            decode.built.engine.add(request(0, [*prompt, 5], num_prompt=len(prompt), ticket=ticket))
            decode.built.engine.step()
            assert decode.built.scheduler.num_loading == 1
            lost(decode, ranks, number)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 10, "closing waits for the lost rank"
        assert not any(map(is_running, ranks.pids.values()))
        first.cancel(RequestId("r0"))
        first.step()
        settle(prefill)
        [answer] = prefill.generate([prompt], GREEDY, NEW_TOKENS)
        assert len(answer.token_ids) == NEW_TOKENS


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize("number", SIGNALS)
def test_the_sender_loses_a_rank_before_its_blocks_are_pulled(
    folder: Path, layout: str, number: signal.Signals
) -> None:
    asked, ranks = prompts(2, [100, 33]), RankProcesses()
    with (
        closing(LLM(folder, settings())) as decode,
        closing(LLM(folder, settings(layout, serves=True), ranks=ranks)) as prefill,
    ):
        wanted = [answer.token_ids for answer in decode.generate(asked, GREEDY, NEW_TOKENS, cache_salt="other")]
        firsts = prefill.run([request(i, prompt, lease_id=f"l{i}") for i, prompt in enumerate(asked)])
        os.kill(ranks.pids[1], number)
        began_s = time.monotonic()
        pairs = enumerate(zip(asked, firsts, strict=True))
        rest = decode.run([request(i, p, token_ids=p + one.token_ids, ticket=one.ticket) for i, (p, one) in pairs])
        assert time.monotonic() - began_s < 20
        assert [a.token_ids + b.token_ids for a, b in zip(firsts, rest, strict=True)] == wanted
        assert decode.built.scheduler.counters.failed_loads == 2
        settle(decode)
        with pytest.raises(RankLost, match="rank 1 is lost"):
            step_until(prefill, began_s + 60)
    assert not any(map(is_running, ranks.pids.values()))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_rank_is_lost_while_it_loads_from_disk(
    folder: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next engine loads the same blocks, as far as all ranks have them."""
    monkeypatch.setattr("stoker.sched.step_rates.StepRates.prefill_tokens_per_s", 100.0)
    monkeypatch.setattr("stoker.kv.store.loader._TIER_GRACE_S", 60.0)
    asked, store = prompts(3, [150]), replace(settings().store, disk_dir=str(tmp_path))
    wanted = None
    for attempt in range(3):
        ranks = RankProcesses()
        with closing(LLM(folder, settings("tp2", store), ranks=ranks)) as llm:
            if attempt == 1:
                one = GenerateRequest(RequestId("x"), asked[0], len(asked[0]), GREEDY, NEW_TOKENS)
                llm.built.engine.add(one, llm.built.store.num_worth_loading(asked[0], ""))
                llm.built.engine.step()
                lost(llm, ranks, number)
                continue
            found = [answer.token_ids for answer in llm.generate(asked, GREEDY, NEW_TOKENS)]
            settle(llm)
            if attempt == 0:
                wanted = found
            else:
                assert found == wanted
                assert llm.built.scheduler.counters.loaded_tokens


def test_hand_offs_after_a_restart_of_the_sender(folder: Path) -> None:
    """Tickets of the engine that ended are refused, and those of the new one are served."""
    asked = prompts(4, [60])
    with closing(LLM(folder, settings())) as decode:
        wanted = [answer.token_ids for answer in decode.generate(asked, GREEDY, NEW_TOKENS, cache_salt="other")]
        for _ in range(2):
            with closing(LLM(folder, settings("tp2", serves=True), ranks=RankProcesses())) as prefill:
                assert hand_over(prefill, decode, asked) == wanted
                settle(prefill)
        settle(decode)
