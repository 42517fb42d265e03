"""The sessions of agents are the same for every server, grow as agents' prompts do, and are compared load by load."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.support.agent_load import LOADS, SMALL, AgentLoad, AgentProfile, agent_sessions, paced, scaled
from bench.support.processes import free_port, python_module, started, wait_for_port
from stoker.loadgen.session import LoadSession

LOAD = AgentLoad("some", 12)


def prompts(session: LoadSession) -> list[list[dict[str, str]]]:
    return [turn.prompt.fields([])["messages"] for turn in session.turns]


def words(message: dict[str, str]) -> int:
    return len(message["content"].split())


def test_equal_seeds_give_equal_sessions_and_other_seeds_other_ones():
    first, second, other = (agent_sessions(LOAD, AgentProfile(), seed) for seed in (3, 3, 4))
    assert [prompts(session) for session in first] == [prompts(session) for session in second]
    assert [turn.pause_s for one in first for turn in one.turns] == [
        turn.pause_s for one in second for turn in one.turns
    ]
    assert prompts(first[0])[0][0] != prompts(other[0])[0][0]


def test_each_turn_resends_what_came_before_it_and_all_sessions_share_the_head():
    sessions = agent_sessions(LOAD, AgentProfile(), 0)
    heads = {prompt[0]["content"] for session in sessions for prompt in prompts(session)}
    assert [len(head.split()) for head in heads] == [AgentProfile().head_tokens]
    for session in sessions:
        for before, after in pairwise(prompts(session)):
            assert after[: len(before)] == before
            assert [message["role"] for message in after[len(before) :]] == ["assistant", "user"]
    tasks = [prompts(session)[0][1]["content"] for session in sessions]
    assert len(set(tasks)) == len(sessions)


def test_lengths_and_times_are_within_the_profile():
    profile = AgentProfile()
    sessions = agent_sessions(LOADS["full"], profile, 0)
    results = [words(prompt[-1]) for session in sessions for prompt in prompts(session)[1:]]
    assert 50 <= min(results) < 100
    assert 4000 < max(results) <= 6000
    turns = [turn for session in sessions for turn in session.turns]
    assert all(40 <= (turn.max_tokens or 0) <= 300 for turn in turns)
    assert all(session.turns[0].pause_s == 0 for session in sessions)
    assert all(0.5 <= turn.pause_s <= 8 for session in sessions for turn in session.turns[1:])
    assert {len(session.turns) for session in sessions} == set(range(4, 9))
    starts = [session.start_s for session in sessions]
    assert starts == sorted(starts)


def test_a_session_ends_before_its_prompt_would_not_fit():
    profile = replace(AgentProfile(), context_tokens=6000)
    for session in agent_sessions(LOAD, profile, 0):
        assert session.turns
        for turn, prompt in zip(session.turns, prompts(session), strict=True):
            assert sum(map(words, prompt)) + (turn.max_tokens or 0) < 6000


def test_loads_and_think_times_can_be_scaled():
    assert scaled(LOADS["light"], 0.25).sessions == 6
    assert scaled(LOADS["light"], 0.001).sessions == 1
    assert paced(SMALL, 0.5).think_s == (0.05, 0.3)


@pytest.fixture
def mock_url(tmp_path: Path):
    port = free_port()
    with started(python_module("bench.support.mock_worker", port, "--chunks", 3), tmp_path / "mock.log"):
        wait_for_port(port)
        yield f"http://127.0.0.1:{port}"


def test_two_servers_get_the_same_sessions_and_are_compared(mock_url: str, tmp_path: Path, capsys):
    details = tmp_path / "details.json"
    argv = ["--small", "--loads", "light", "--think-scale", "0.01", "--version", "vllm=0.26.0"]
    targets = ["--target", f"stoker={mock_url}", "--target", f"vllm={mock_url}"]
    out = ["--details", str(details), "--save-to", str(tmp_path), "--case", "A model"]
    assert main(["run", "agent_sessions", *argv, *targets, *out]) == 0
    measured = json.loads(details.read_text())
    assert [(one["server"], one["load"]) for one in measured] == [
        ("stoker", "light, 2 sessions"),
        ("vllm", "light, 2 sessions"),
    ]
    assert measured[0]["summary"]["requests"] == measured[1]["summary"]["requests"] >= 8
    assert measured[0]["first_ttft_ms"]["count"] == 2
    assert (
        measured[0]["first_ttft_ms"]["count"] + measured[0]["later_ttft_ms"]["count"]
        == measured[0]["summary"]["requests"]
    )
    saved = {row["metric"]: row for row in json.loads((tmp_path / "agent_sessions.json").read_text())}
    assert saved["TTFT of later turns p90"]["target"] == 1.0
    assert saved["time between tokens p99"]["target"] == 2.0
    assert saved["wall time"]["competitor"] == "vLLM 0.26.0"
    assert "A model, light, 2 sessions, requests failed: 0 requests" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_reported_and_the_other_one_is_measured(mock_url: str, tmp_path: Path, capsys):
    argv = ["--small", "--loads", "light", "--think-scale", "0.01", "--log-dir", str(tmp_path)]
    servers = ["--server", "vllm=false", "--target", f"stoker={mock_url}"]
    assert main(["run", "agent_sessions", *argv, *servers]) == 1
    shown = capsys.readouterr()
    assert "vllm: vllm ended with 1 before it was ready" in shown.err
    assert "SmolLM2, light, 2 sessions, wall time" in shown.out


def test_engines_need_a_model_folder(capsys):
    assert main(["run", "agent_sessions", "--engine", "stoker"]) == 2
    assert "--engine needs --model DIR" in capsys.readouterr().err
