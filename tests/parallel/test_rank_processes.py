"""Ranks as processes: the answers of one process, and bit by bit those of threads. A rank that is lost is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.base.config import NodeSettings, RankSettings
from stoker.base.errors import ConfigError, StokerError
from stoker.engine.llm import LLM
from stoker.engine.ranks import rank_processes
from stoker.engine.ranks.rank_processes import RankProcesses
from stoker.parallel.plan_transport import PlansStuck
from stoker.parallel.rank_watch import RankLost
from stoker.sched.request import SamplingParams
from stoker.sched.step_costs import StepCosts
from stoker.sched.step_size import StepSize
from tests.parallel.rank_cases import CHANGES, LAYOUTS, ParityGrammars, answers, requests, settings
from tests.parallel.virtual_ranks import VirtualRanks
from tests.tiny import make_tiny

SLOW_CASES = [("dense", "tp2"), ("dense", "pp2"), ("experts", "tp2"), ("experts", "pp2"), ("experts", "tp2 pp2")]
SLOW_CASES += [("latent", "tp2"), ("latent", "pp2"), ("latent", "tp2 pp2 cp2"), ("latent", "tp4 cp2")]
DIVERGING = (sys.executable, str(Path(__file__).parent / "diverging_rank.py"))


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the number of drafts depends on how fast this machine is."""
    monkeypatch.setattr(StepSize, "costs", StepCosts())


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    make_tiny(folder, "llama-tied", torch.float64, **CHANGES)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    make_tiny(folder, "qwen3-moe", torch.float64, **CHANGES)
    return folder


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    make_tiny(folder, "deepseek", torch.float64, **{**CHANGES, "num_key_value_heads": 8})
    return folder


def is_running(pid: int) -> bool:
    """Return True unless the process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", "tp2 pp2"),
        ("experts", "ep2"),
        ("latent", "tp2 cp2"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES),
    ],
)
def test_processes_give_the_answers_of_threads_bit_by_bit(
    request: pytest.FixtureRequest, model: str, layout: str
) -> None:
    """With drafts, grammars, prefix hits and preemptions. Slow ones are the layouts whose parts the others have."""
    folder, asked, found = request.getfixturevalue(model), requests(11, 8), []
    tight = settings(LAYOUTS[layout], num_blocks=20, drafter="ngram,grammar")
    with closing(LLM(folder, settings(), grammars=ParityGrammars())) as alone:
        wanted = answers(alone, asked)
    for ranks in (VirtualRanks(), RankProcesses()):
        with closing(LLM(folder, tight, grammars=ParityGrammars(), ranks=ranks)) as llm:
            got = answers(llm, asked)
            found.append((got, [(one.logprob, one.top_logprobs) for output in got for one in output.logprobs]))
    assert found[0][1] == found[1][1]
    assert found[0][0] == found[1][0]
    assert [(one.token_ids, one.finish) for one in got] == [(one.token_ids, one.finish) for one in wanted]
    assert isinstance(ranks, RankProcesses)
    assert not any(map(is_running, ranks.pids.values()))


def step_until(llm: LLM, give_up_s: float) -> None:
    while time.monotonic() < give_up_s:
        llm.built.engine.step()


@pytest.mark.parametrize(("layout", "number"), [("tp2", signal.SIGKILL), ("pp2", signal.SIGSTOP)])
def test_a_lost_rank_is_named_within_five_seconds(dense: Path, layout: str, number: signal.Signals) -> None:
    ranks = RankProcesses()
    with closing(LLM(dense, settings(LAYOUTS[layout]), ranks=ranks)) as llm:
        for request in requests(1, 5):
            if request.sampling.grammar is None:
                llm.built.engine.add(request)
        for _ in range(6):
            llm.built.engine.step()
        os.kill(ranks.pids[1], number)
        lost_s = time.monotonic()
        with pytest.raises(RankLost, match="rank 1 is lost"):
            step_until(llm, lost_s + 20)
        assert time.monotonic() - lost_s < 5.5
        with pytest.raises(RankLost, match="rank 1"):
            llm.generate([[1, 2, 3]])
    assert not any(map(is_running, ranks.pids.values()))


@pytest.mark.parametrize("how", ["tokens", "plan"])
def test_a_diverging_rank_is_named(dense: Path, how: str) -> None:
    ranks = RankProcesses(command=(*DIVERGING, how))
    what = {"tokens": "sampled other tokens", "plan": "received another plan"}[how]
    llm = LLM(dense, settings(LAYOUTS["tp2"]), ranks=ranks)
    with closing(llm), pytest.raises(RankLost, match=rf"rank 1 has diverged: in step \d+ it {what}"):
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0), max_new_tokens=40)
    assert not any(map(is_running, ranks.pids.values()))


def test_a_rank_with_other_weights_or_settings_is_refused_by_name(dense: Path) -> None:
    ranks = RankProcesses(command=(*DIVERGING, "settings"))
    with pytest.raises(StokerError, match="rank 1 differs from rank 0 in settings"):
        LLM(dense, settings(LAYOUTS["tp2"]), ranks=ranks)
    assert not any(map(is_running, ranks.pids.values()))


def test_a_rank_that_fails_at_its_start_says_why(dense: Path) -> None:
    ranks = RankProcesses(command=(*DIVERGING, "memory"))
    with pytest.raises(RankLost, match=r"rank 1 failed: .*no room for this rank"):
        LLM(dense, settings(LAYOUTS["tp2"]), ranks=ranks)
    assert not any(map(is_running, ranks.pids.values()))


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_loads_is_named(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeats go on. The limit is above the time of its imports on a busy machine."""
    monkeypatch.setattr(rank_processes, "_START_S", 30.0)
    ranks = RankProcesses(command=(*DIVERGING, "drive"))
    engine = replace(settings(LAYOUTS["tp2"]), nodes=NodeSettings(wait_s=0.1))
    with pytest.raises(RankLost, match=r"rank 1 is lost: its start made no progress for 30\.\d s"):
        LLM(dense, engine, ranks=ranks)
    assert not any(map(is_running, ranks.pids.values()))


def test_a_rank_that_never_starts_is_an_error(dense: Path) -> None:
    ranks = RankProcesses(command=(sys.executable, "-c", "pass"))
    with pytest.raises(RankLost, match="rank 1 is lost: its process ended with exit code 0"):
        LLM(dense, settings(LAYOUTS["tp2"]), ranks=ranks)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (RankSettings(3), "num_attention_heads 8 cannot be split into 3"),
        (RankSettings(1, 5), "pp=5: the model has only 4 layers"),
        (RankSettings(2, 1, 3), "ep=3 does not divide tp=2"),
        (RankSettings(2, 1, 2), "ep=2: the model has no experts to split; leave out --ep"),
    ],
)
def test_what_cannot_be_split_is_refused_before_any_rank_loads(dense: Path, ranks: RankSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(dense, settings(ranks))


def test_experts_that_do_not_divide_are_refused(experts: Path) -> None:
    with pytest.raises(ConfigError, match="the number of experts 4 cannot be split into 8"):
        LLM(experts, settings(RankSettings(8, 1, 8)), ranks=VirtualRanks())


def test_ranks_end_with_rank_0(dense: Path, tmp_path: Path) -> None:
    """Rank 0 is killed: the kernel kills the others."""
    script = tmp_path / "rank0.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        f"sys.path[:0] = {[str(Path(__file__).parents[2])]!r}\n"
        "from stoker.engine.llm import LLM\n"
        "from tests.parallel.rank_cases import LAYOUTS, settings\n"
        "from stoker.engine.ranks.rank_processes import RankProcesses\n"
        "ranks = RankProcesses()\n"
        f"llm = LLM(Path({str(dense)!r}), settings(LAYOUTS['tp2 pp2']), ranks=ranks)\n"
        "print(*ranks.pids.values(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as rank0:
        assert rank0.stdout is not None
        pids = [int(word) for word in rank0.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(is_running, pids))
        rank0.kill()
    give_up_s = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_a_lost_rank_is_named_when_a_plan_does_not_reach_it() -> None:
    """The plan's connection may break before the watch has noticed anything."""

    class Broken:
        def send(self, frame: bytes) -> None:
            threading.Timer(0.05, fail).start()
            raise PlansStuck("rank 1 cannot be reached")

        def close(self) -> None: ...

    def fail() -> None:
        ranks._watch.fail("rank 1 is lost: killed by a test")

    ranks = RankProcesses()
    ranks._plans.append(Broken())
    with pytest.raises(RankLost, match="rank 1 is lost: killed by a test"):
        ranks.send(b"plan")
