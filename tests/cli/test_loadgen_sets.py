from __future__ import annotations

import gzip
import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import ConfigError
from stoker.loadgen import prompts
from stoker.loadgen.datasets import DatasetSpec, load_dataset, num_turns
from stoker.loadgen.load import LoadPlan
from stoker.loadgen.session import FollowUp, LoadSession, TokenRange, Turn, first_requests
from stoker.loadgen.traces import Replay, agent_session, mooncake_sessions, spread, trace_sessions

HELLO = FollowUp(["hello"])


def tokens(turn: Turn) -> list[int]:
    found: list[int] = turn.prompt.fields(())["prompt"]
    return found


def mooncake(timestamp: int, input_length: int, output_length: int, *hash_ids: int) -> dict[str, Any]:
    lengths = {"input_length": input_length, "output_length": output_length}
    return {"timestamp": timestamp, **lengths, "hash_ids": list(hash_ids)}


# ---- traces


def test_the_same_block_id_gives_the_same_tokens_and_lengths_shrink_by_one_factor():
    rows = [mooncake(0, 1400, 640, 0, 1, 2), mooncake(0, 1600, 64, 0, 1, 3, 4)]
    first, second = (session.turns[0] for session in mooncake_sessions(rows, Replay(block_tokens=8)))
    assert (len(tokens(first)), len(tokens(second))) == (22, 25)
    assert tokens(first)[:16] == tokens(second)[:16]
    assert tokens(first)[16:] != tokens(second)[16:22]
    assert (first.max_tokens, second.max_tokens) == (10, 1)
    assert tokens(first) == tokens(first)


def test_unscaled_blocks_have_the_traces_own_lengths():
    [session] = mooncake_sessions([mooncake(0, 1000, 7, 5, 6)], Replay())
    assert len(tokens(session.turns[0])) == 1000
    assert session.turns[0].max_tokens == 7


def test_tokens_stay_in_their_range():
    sampled = TokenRange(10, 20).sample("x", 1000)
    assert set(sampled) == set(range(10, 20))
    assert max(TokenRange.below(64).sample("x", 1000)) < 64


def test_tokens_after_the_last_named_block_are_the_requests_own():
    rows = [mooncake(0, 1024, 1, 0), mooncake(0, 1024, 1, 0)]
    first, second = (tokens(session.turns[0]) for session in mooncake_sessions(rows, Replay(block_tokens=8)))
    assert (len(first), len(second)) == (16, 16)
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]


def test_batches_of_arrivals_are_spread_over_their_step():
    assert spread([0.0, 0.0, 0.0, 3.0, 6.0, 6.0]) == [0.0, 1.0, 2.0, 3.0, 6.0, 7.5]
    assert spread([5.0]) == [5.0]


def test_a_speedup_brings_arrivals_closer():
    rows = [mooncake(0, 512, 1, 0), mooncake(3000, 512, 1, 1)]
    assert [session.start_s for session in mooncake_sessions(rows, Replay(speedup=10))] == [0.0, 0.3]


def agent(name: str, first_id: int) -> dict[str, Any]:
    sub = {"t": 9.0, "type": "subagent", "agent_id": "agent_1", "tool_tokens": 0, "system_tokens": 64}
    return {
        "id": name,
        "block_size": 64,
        "tool_tokens": 64,
        "system_tokens": 70,
        "requests": [
            {"in": 300, "out": 64, "think_time": 0.0, "runs": [[first_id, 5]]},
            {**sub, "requests": [{"in": 128, "out": 8, "runs": [[900, 2]]}]},
            {"in": 400, "out": 64, "think_time": 500.0, "runs": [[first_id, 4], [first_id + 50, 3]]},
        ],
    }


def test_an_agent_session_keeps_its_prefix_pauses_and_sub_agents():
    first, sub, last = agent_session(agent("s", 1), Replay(block_tokens=8, speedup=2, max_pause_s=100)).turns
    assert (len(tokens(first)), len(tokens(sub)), len(tokens(last))) == (38, 16, 50)
    assert tokens(first)[:32] == tokens(last)[:32]
    assert tokens(first)[32:] != tokens(last)[32:38]
    assert (first.pause_s, last.pause_s) == (0.0, 50.0)
    assert (first.session, first.parent) == ("s", "")
    assert (sub.session, sub.parent) == ("s/agent_1", "s")


def test_sessions_with_the_same_tools_and_system_prompt_share_that_prefix_and_no_more():
    one, other = (tokens(agent_session(agent(name, 1), Replay(block_tokens=8)).turns[0]) for name in "ab")
    assert one[:16] == other[:16]
    assert one[16:24] != other[16:24]


def test_a_trace_of_neither_kind_is_refused(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hello": 1}\n')
    with pytest.raises(ConfigError, match="neither hash_ids"):
        trace_sessions(path, Replay())
    path.write_text("{nonsense\n")
    with pytest.raises(ConfigError, match="line 1"):
        trace_sessions(path, Replay())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace", b"5\n", "not a trace"),
        ("trace", b'{"hash_ids": [1]}\n', "KeyError: 'timestamp'"),
        ("trace", b'{"hash_ids": [1], "timestamp": 0, "input_length": "x", "output_length": 1}\n', "not a trace"),
        ("trace", b'{"requests": []}\n', "KeyError: 'id'"),
        ("sharegpt", b'{"conversations": []}\n', "not conversations in ShareGPT's format"),
        ("sharegpt", b'[{"conversations": [{"from": "human"}]}]\n', "KeyError: 'value'"),
    ],
)
def test_a_file_of_another_shape_is_refused_by_its_name(tmp_path: Path, name: str, text: bytes, message: str):
    path = tmp_path / "set.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"set\.json: ") as refused:
        load_dataset(DatasetSpec(name, file=path))
    assert message in refused.value.message


@pytest.mark.parametrize("name", ["trace", "sharegpt"])
@pytest.mark.parametrize("cut", [slice(-9), slice(1, None)])
def test_a_truncated_file_is_refused_by_its_name(tmp_path: Path, name: str, cut: slice):
    path = tmp_path / "set.json.gz"
    path.write_bytes(gzip.compress(b"{}\n" * 9)[cut])
    with pytest.raises(ConfigError, match=r"set\.json\.gz: cannot be read: "):
        load_dataset(DatasetSpec(name, file=path))


def test_the_public_conversation_trace_repeats_as_much_scaled_as_whole(data_dir: Path):
    path = data_dir / "traces/mooncake_conversation.jsonl.gz"
    sessions = trace_sessions(path, Replay(block_tokens=2))
    assert len(sessions) == 12031
    starts = [session.start_s for session in sessions]
    assert starts == sorted(starts, key=lambda start_s: start_s or 0.0)
    seen: set[str] = set()
    hits = total = 0
    for session in sessions:
        prompt = session.turns[0].prompt
        full = prompt.names[: prompt.num_tokens // prompt.block_tokens]  # type: ignore[attr-defined]
        for name in full:
            if name not in seen:
                break
            hits += 2
        seen.update(full)
        total += prompt.num_tokens  # type: ignore[attr-defined]
    assert hits / total == pytest.approx(0.373, abs=0.005)


def test_the_public_agent_sessions_load(data_dir: Path):
    sessions = trace_sessions(data_dir / "traces/claude_code_sessions.jsonl.gz", Replay(block_tokens=1))
    assert len(sessions) == 347
    assert num_turns(sessions) == 23926
    assert any(turn.parent for session in sessions for turn in session.turns)


# ---- prompts


@pytest.mark.parametrize("name", ["arena", "gsm8k", "humaneval", "mtbench", "specbench", "mint", "sweagent", "tau"])
def test_no_request_of_a_public_set_ends_with_an_assistant_message(data_dir: Path, name: str):
    sessions = load_dataset(DatasetSpec(name, num_requests=50, data_dir=data_dir, max_tokens=77))
    assert 1 <= num_turns(sessions) <= 50
    for session in sessions:
        for number, turn in enumerate(session.turns):
            messages = turn.prompt.fields(["..."] * number)["messages"]
            assert messages
            assert messages[-1]["role"] in ("user", "tool")
            assert all("tool_call_ids" not in message for message in messages)
            assert turn.max_tokens == 77


def test_agents_resend_all_messages_and_their_tools(data_dir: Path):
    [session, *_] = load_dataset(DatasetSpec("tau", num_requests=None, data_dir=data_dir))
    bodies = [turn.prompt.fields(()) for turn in session.turns]
    for before, after in pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert len(after["messages"]) > len(before["messages"])
    assert all(body["tools"] for body in bodies)


def test_flattened_tools_leave_plain_messages(data_dir: Path):
    for session in load_dataset(DatasetSpec("tau", num_requests=60, data_dir=data_dir, flatten_tools=True)):
        for turn in session.turns:
            fields = turn.prompt.fields(())
            assert "tools" not in fields
            assert {key for message in fields["messages"] for key in message} == {"role", "content"}
            assert {message["role"] for message in fields["messages"]} <= {"system", "user", "assistant"}


def test_the_same_seed_gives_the_same_prompts(data_dir: Path):
    def ids(seed: int) -> list[str]:
        spec = DatasetSpec("arena", num_requests=20, data_dir=data_dir, seed=seed)
        return [session.turns[0].session for session in load_dataset(spec)]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


def test_sharegpt_is_replayed_turn_by_turn(tmp_path: Path):
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "x", "conversations": talk}, {"conversations": []}]))
    [session] = load_dataset(DatasetSpec("sharegpt", file=path))
    assert [turn.prompt.fields(())["messages"] for turn in session.turns] == [
        [{"role": "user", "content": "a"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    ]
    [single] = load_dataset(DatasetSpec("sharegpt", file=path, max_turns=1))
    assert len(single.turns) == 1


def test_random_lengths_lie_within_their_ratio():
    sessions = prompts.random_tokens(200, 100, 50, 0.5, seed=3, token_range=TokenRange())
    lengths = [len(tokens(session.turns[0])) for session in sessions]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(set(lengths)) > 30
    assert all(25 <= (session.turns[0].max_tokens or 0) <= 75 for session in sessions)
    [words] = prompts.random_words(1, 40, 8, 0.0, seed=3)
    assert len(words.turns[0].prompt.fields(())["messages"][0]["content"].split()) == 40


def test_a_follow_up_holds_the_servers_own_answer():
    assert FollowUp(["a", "b"]).fields(["said"])["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "said"},
        {"role": "user", "content": "b"},
    ]


def test_the_last_session_is_cut_to_the_number_of_requests():
    sessions = [LoadSession([Turn(HELLO, "s")] * 3)] * 4
    assert [len(session.turns) for session in first_requests(sessions, 7, None)] == [3, 3, 1]
    assert [len(session.turns) for session in first_requests(sessions, None, 2)] == [2, 2, 2, 2]


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"arena\.jsonl\.gz"):
        load_dataset(DatasetSpec("arena", data_dir=tmp_path))
    with pytest.raises(ConfigError, match="there is no data folder"):
        load_dataset(DatasetSpec("arena", data_dir=tmp_path / "absent"))
    with pytest.raises(ConfigError, match="--trace FILE"):
        load_dataset(DatasetSpec("trace"))


# ---- arrivals


def test_constant_arrivals_are_evenly_spaced():
    assert list(islice(LoadPlan(rate=4, arrival="constant").starts(), 4)) == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(("arrival", "burstiness", "variation"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0)])
def test_random_arrivals_have_their_rate_and_variation(arrival: Any, burstiness: float, variation: float):
    load = LoadPlan(rate=10, arrival=arrival, burstiness=burstiness, seed=5)
    starts = [start_s or 0.0 for start_s in islice(load.starts(), 20001)]
    gaps = [after - before for before, after in pairwise(starts)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.1, rel=0.05)
    assert deviation / mean == pytest.approx(variation, rel=0.05)
    assert starts == [start_s or 0.0 for start_s in islice(load.starts(), 20001)]


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"slots": 0}, {"burstiness": -1.0}])
def test_invalid_load_plans_are_refused(wrong: Any):
    with pytest.raises(ConfigError):
        LoadPlan(**wrong)
