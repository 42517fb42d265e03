"""Workloads: what traces become, and that wrong lines are named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import ConfigError
from stoker.sim.workloads.agent_sessions import AgentSessions
from stoker.sim.workloads.azure import AzureTrace
from stoker.sim.workloads.mooncake import MooncakeTrace
from stoker.sim.workloads.synthetic import Synthetic
from stoker.sim.workloads.workload import SimTurn, Workload

REQUEST = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
AGENT_REQUEST = {"t": 0.0, "in": 200, "out": 9, "think_time": 4.0, "runs": [[1, 4]]}
AGENT = {
    "id": "a",
    "block_size": 64,
    "tool_tokens": 64,
    "system_tokens": 64,
    "requests": [AGENT_REQUEST, AGENT_REQUEST],
}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def turns(workload: Workload) -> list[tuple[float, SimTurn]]:
    return [(session.start_s, turn) for session in workload.sessions() for turn in session.turns]


def test_blocks_of_a_mooncake_trace_repeat_where_their_ids_do(tmp_path: Path) -> None:
    other = {**REQUEST, "timestamp": 4000, "input_length": 1024, "hash_ids": [7, 8]}
    (start_s, first), (later_s, second) = turns(MooncakeTrace(jsonl(tmp_path / "t.jsonl", REQUEST, other)))
    assert (start_s, later_s) == (0.0, 4.0)
    assert first.num_tokens == 1100
    assert second.token_ids() == first.token_ids()[:1024]
    assert second.output_id != first.output_id


def test_a_batch_of_a_mooncake_trace_is_spread_until_the_next(tmp_path: Path) -> None:
    rows = [REQUEST, REQUEST, {**REQUEST, "timestamp": 3000}]
    trace = MooncakeTrace(jsonl(tmp_path / "t.jsonl", *rows), speedup=2.0)
    assert [start_s for start_s, _ in turns(trace)] == [0.0, 0.75, 1.5]


def test_an_azure_trace_starts_with_its_first_row(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    rows = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:04.4799600,30,0\n"
    )
    path.write_bytes(gzip.compress(rows.encode()))
    (start_s, first), (later_s, second) = turns(AzureTrace(path))
    assert (start_s, later_s) == (0.0, pytest.approx(0.5))
    assert (first.num_tokens, first.output_tokens) == (48, 10)
    assert (second.num_tokens, second.output_tokens) == (30, 1)


def test_agent_sessions_share_their_system_prompt_and_keep_their_own_blocks(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", AGENT, {**AGENT, "id": "b"})
    found = turns(AgentSessions(path, start_spread_s=0.0))
    first, again, other = found[0][1], found[1][1], found[2][1]
    assert first.token_ids() == again.token_ids()
    assert first.token_ids()[:128] == other.token_ids()[:128]
    assert first.token_ids()[128] != other.token_ids()[128]
    assert (first.pause_s, again.pause_s) == (0.0, 4.0)


def test_fixed_arrivals_of_agents_follow_the_recorded_times(tmp_path: Path) -> None:
    row = {**AGENT, "requests": [AGENT_REQUEST, {**AGENT_REQUEST, "t": 30.0}]}
    trace = AgentSessions(jsonl(tmp_path / "a.jsonl", row), start_spread_s=0.0, fixed=True)
    assert [turn.at_s for _, turn in turns(trace)] == [0.0, 30.0]


def test_a_synthetic_turn_contains_all_before_it() -> None:
    found = [turn for _, turn in turns(Synthetic(requests=3, turns=3, system_tokens=50, spread=0.5))]
    for before, after in pairwise(found):
        assert after.token_ids()[: before.num_tokens] == before.token_ids()
        answer = [before.output_id] * before.output_tokens
        assert after.token_ids()[before.num_tokens :][: len(answer)] == answer


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"timestamp": -5}, "timestamp=-5"),
        ({"timestamp": "now"}, "timestamp='now'"),
        ({"timestamp": 1}, "timestamp goes back"),
        ({"input_length": 0}, "input_length=0"),
        ({"input_length": 1.5}, "input_length=1.5"),
        ({"input_length": 10**12}, "input_length=1000000000000"),
        ({"output_length": None}, "output_length=None"),
        ({"hash_ids": [1, 2, 3, 4, 5]}, "5 hash_ids"),
        ({"hash_ids": "abc"}, "hash_ids must be"),
        ({"hash_ids": [-1]}, "hash_ids must be"),
    ],
)
def test_a_wrong_line_of_a_mooncake_trace_is_named(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    row = {**REQUEST, "timestamp": 9, **change}
    path = jsonl(tmp_path / "t.jsonl", {**REQUEST, "timestamp": 9}, row)
    with pytest.raises(ConfigError, match="line 2") as wrong:
        turns(MooncakeTrace(path))
    assert problem in wrong.value.message


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    row = {name: value for name, value in REQUEST.items() if name != "input_length"}
    with pytest.raises(ConfigError, match="line 1: the field 'input_length' is missing"):
        turns(MooncakeTrace(jsonl(tmp_path / "t.jsonl", row)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("TIMESTAMP,ContextTokens\n", "line 1: the columns GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2: TIMESTAMP='yesterday'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,1\n", "line 2: ContextTokens='x'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5\n", "line 2: GeneratedTokens=None"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,5\n2023-11-16 18:17:02,5,5\n",
            "line 3: TIMESTAMP goes back",
        ),
    ],
)
def test_a_wrong_line_of_an_azure_trace_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as wrong:
        turns(AzureTrace(path))
    assert problem in wrong.value.message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda row: row.pop("block_size"), "line 1: the field 'block_size' is missing"),
        (lambda row: row.update(requests=3), "line 1: the field 'requests' must be a list"),
        (lambda row: row["requests"][1].update(runs=[[1]]), "line 1, request 2: runs must be pairs"),
        (lambda row: row["requests"][1].pop("out"), "line 1, request 2: the field 'out' is missing"),
        (lambda row: row["requests"][1].update(think_time=-1), "line 1, request 2: think_time=-1"),
        (lambda row: row["requests"][0].update(t=1e6), "line 1, request 2: t goes back from 1e+06 s to"),
    ],
)
def test_a_wrong_line_of_agent_sessions_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    row = json.loads(json.dumps(AGENT))
    change(row)
    with pytest.raises(ConfigError) as wrong:
        turns(AgentSessions(jsonl(tmp_path / "a.jsonl", row)))
    assert problem in wrong.value.message


def test_the_times_of_a_sub_agent_may_overlap_those_of_its_agent(tmp_path: Path) -> None:
    row = json.loads(json.dumps(AGENT))
    first, *others = row["requests"]
    row["requests"] = [first, {"requests": [{**first, "t": 50.0}]}, *others]
    assert len(turns(AgentSessions(jsonl(tmp_path / "a.jsonl", row), fixed=True))) == len(AGENT["requests"]) + 1


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match=r"t\.jsonl\.gz: cannot be read"):
        turns(MooncakeTrace(path))
    with pytest.raises(ConfigError, match="line 1"):
        turns(MooncakeTrace(jsonl(tmp_path / "list.jsonl", [1, 2])))


def test_deep_nesting_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path, depth = tmp_path / "deep.jsonl", 100_000
    path.write_text('{"id":"a","block_size":64,"requests":[' + '{"requests":[' * depth + "]}" * depth + "]}")
    with pytest.raises(ConfigError, match="line 1"):
        turns(AgentSessions(path))
