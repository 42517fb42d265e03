"""The cache doctor names the cause of each miss, and its parts add up to the uncached tokens (`CachingFleet.end` checks it)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gateway.doctor.caching_fleet import BLOCK, CachingFleet, Messages, assistant, system, user

from stoker.base.ids import WorkerId
from stoker.gateway.doctor.miss_parts import MissPart

SYSTEM = system("You are a helpful agent with a long system prompt. " * 4)
QUESTION = user("Please read the file and tell me what it is about. " * 3)
ANSWER = "I will read the file now, and then I will tell you what it is about."
MORE = user("Thank you. Now write a summary of it into another file, please. " * 2)
FIRST = [SYSTEM, QUESTION]
SECOND = [*FIRST, assistant(ANSWER), MORE]


def named(parts: tuple[MissPart, ...]) -> dict[tuple[str, str], int]:
    return {(part.reason, part.place): part.tokens for part in parts}


def largest(parts: tuple[MissPart, ...]) -> tuple[str, str]:
    best = max(parts, key=lambda part: part.tokens)
    return best.reason, best.place


def asked_once(**more: Any) -> CachingFleet:
    fleet = CachingFleet(**more)
    fleet.ask(FIRST, ANSWER)
    fleet.clock.advance(60.0)
    return fleet


def test_the_first_turn_is_named() -> None:
    assert largest(CachingFleet().ask(FIRST)) == ("first_turn", "")


def test_a_first_turn_behind_a_shared_system_prompt_is_a_first_turn() -> None:
    parts = asked_once().ask([SYSTEM, user("Something else entirely. " * 5)])
    assert {reason for reason, _ in named(parts)} == {"first_turn", "partial_block"}


def test_only_the_new_end_of_the_next_turn_is_new() -> None:
    parts = named(asked_once().ask(SECOND))
    assert set(parts) <= {("new", ""), ("partial_block", "")}
    assert parts["new", ""] >= len(MORE["content"]) - BLOCK


def test_what_does_not_fill_a_block_is_a_partial_block() -> None:
    assert named(CachingFleet().ask([user("hi")])) == {("partial_block", ""): len("<u>hi<a>")}
    prompt = user("x" * (2 * BLOCK - len("<u><a>")))  # two full blocks: the second is computed for its last token
    fleet = CachingFleet()
    fleet.ask([prompt])
    assert named(fleet.ask([prompt])) == {("partial_block", ""): BLOCK}


def test_a_changed_message_is_named() -> None:
    fleet = asked_once()
    fleet.ask(SECOND, ANSWER)
    changed = [SYSTEM, user("Please read the OTHER file. " * 6), *SECOND[2:], assistant(ANSWER), MORE]
    assert largest(fleet.ask(changed)) == ("changed", "message 1")


def test_a_rewritten_history_is_named_within_a_session() -> None:
    fleet = CachingFleet()
    fleet.ask(SECOND, ANSWER, session="tenant:s")
    compacted = [
        SYSTEM,
        user("Summary of the conversation: nothing happened. " * 4),
        assistant("Good."),
        user("Go on."),
    ]
    assert largest(fleet.ask(compacted, session="tenant:s")) == ("changed", "message 1")


def test_a_changed_system_prompt_is_named_without_a_session() -> None:
    fleet = asked_once()
    changed = [system("Today is Tuesday. " + str(SYSTEM["content"])), *SECOND[1:]]
    assert largest(fleet.ask(changed)) == ("changed", "message 0")


@pytest.mark.parametrize(("tools", "place"), [(["read", "write", "grep"], "tool 2"), (["read", "edit"], "tool 1")])
def test_a_changed_tool_is_named(tools: list[str], place: str) -> None:
    fleet = CachingFleet()
    fleet.ask(FIRST, ANSWER, tools=["read", "write"])
    assert largest(fleet.ask(SECOND, tools=tools)) == ("changed", place)


def test_a_changed_option_of_the_template_is_named() -> None:
    assert largest(asked_once().ask(SECOND, thinks=False)) == ("changed", "options")


def test_an_answer_that_comes_back_as_other_text_is_named() -> None:
    fleet = CachingFleet()
    fleet.ask(FIRST, f"<think>{'Let me think about it. ' * 8}</think>{ANSWER}")
    assert ("answer_changed", "") in named(fleet.ask(SECOND))


def test_another_salt_is_named() -> None:
    fleet = CachingFleet()
    fleet.ask(FIRST, ANSWER, salt="a")
    assert largest(fleet.ask(SECOND, salt="b")) == ("salted", "")


def test_the_text_of_another_tenant_is_not_told_apart_from_a_first_turn() -> None:
    fleet = CachingFleet()
    running = fleet.begin(FIRST, salt="theirs")
    fleet.doctor.examine("other tenant", running.envelope, running.query, running.route, 100, 0)
    assert largest(fleet.ask(FIRST, salt="ours")) == ("first_turn", "")


def test_an_evicted_prefix_is_named_with_its_time() -> None:
    fleet = asked_once(num_workers=1)
    [worker] = fleet.workers.values()
    fleet.evict(worker, list(worker.device))
    fleet.clock.advance(45.0)
    assert largest(fleet.ask(SECOND)) == ("evicted", "45s")


def test_what_is_evicted_after_routing_is_named() -> None:
    fleet = asked_once(num_workers=1)
    [worker] = fleet.workers.values()
    running = fleet.begin(SECOND)
    fleet.evict(worker, list(worker.device))
    running.num_cached = 0
    assert largest(fleet.end(running)) == ("evicted", "after routing")


@pytest.mark.parametrize("leaves", [False, True])
def test_a_restarted_worker_is_named(leaves: bool) -> None:
    fleet = asked_once()
    holder = next(worker for worker in fleet.workers.values() if worker.device)
    holder.device.clear()
    if leaves:
        fleet.fleet.remove(holder.worker_id, fleet.clock.now())
        fleet.indexes.forget(holder.worker_id)
    else:
        fleet.index.cleared(holder.worker_id)
    assert largest(fleet.ask(SECOND))[0] == "restarted"


def test_blocks_that_another_request_still_computes_are_named() -> None:
    fleet = CachingFleet(num_workers=1)
    first, second = fleet.begin(FIRST), fleet.begin([*FIRST, user("and more")])
    fleet.end(first)
    assert largest(fleet.end(second)) == ("pending", "")


def test_blocks_that_no_worker_stored_are_named() -> None:
    fleet = CachingFleet(num_workers=1)
    fleet.end(fleet.begin(FIRST), stores=False)
    fleet.clock.advance(31.0)
    fleet.ask([user("Another prompt, so that the index forgets what was not confirmed.")])
    assert largest(fleet.ask(FIRST))[0] == "not_stored"


def test_a_prefix_that_only_an_unusable_worker_holds_is_named() -> None:
    fleet = asked_once()
    holder = next(worker.worker_id for worker in fleet.workers.values() if worker.device)
    assert largest(fleet.end(fleet.begin(SECOND, excluded=frozenset({holder})))) == ("held_elsewhere", "")


def test_a_request_that_was_routed_for_load_is_named() -> None:
    fleet = asked_once(policy="round_robin")
    assert largest(fleet.ask(SECOND)) == ("routed_for_load", "")


def test_blocks_in_a_tier_that_were_not_loaded_are_named() -> None:
    fleet = asked_once(num_workers=1)
    [worker] = fleet.workers.values()
    keys = list(worker.device)
    fleet.index.stored(worker.worker_id, keys, "CPU")
    fleet.evict(worker, keys)
    assert largest(fleet.ask(SECOND)) == ("not_loaded", "")


def test_reasons_add_up_on_every_request_of_a_soak() -> None:
    """Conversations grow, change and fork while workers evict, restart and fail, with hardly any memory for the doctor."""
    rng = random.Random(7)
    fleet = CachingFleet(num_workers=3, capacity=120)
    fleet.doctor._turns._max_hashes = 600
    conversations: list[Messages] = []
    seen: set[str] = set()
    for number in range(600):
        fleet.clock.advance(rng.random() * 20)
        if not conversations or rng.random() < 0.1:
            conversations.append([SYSTEM, user(f"Task {number}: {'word ' * rng.randrange(40)}")])
        chosen = rng.randrange(len(conversations))
        messages = conversations[chosen]
        answer = f"Answer {number} {'and ' * rng.randrange(20)}"
        excluded = frozenset({WorkerId(f"w{rng.randrange(3)}")} if rng.random() < 0.1 else set[WorkerId]())
        parts = fleet.ask(
            messages,
            answer,
            tools=["read", "write"][: rng.choice([2, 2, 2, 1])],
            salt=rng.choice([None, None, None, "salt"]),
            session=rng.choice([None, f"tenant:{chosen}"]),
            thinks=rng.random() < 0.95,
            excluded=excluded,
        )
        seen |= {part.reason for part in parts}
        conversations[chosen] = [*messages, assistant(answer), user(f"Turn {number} {'more ' * rng.randrange(30)}")]
        if rng.random() < 0.1:
            at = rng.randrange(len(messages))
            conversations[chosen][at] = {**messages[at], "content": f"rewritten {number}"}
        if len(conversations[chosen]) > 20:
            del conversations[chosen]
        if rng.random() < 0.02:
            worker = rng.choice(list(fleet.workers.values()))
            worker.device.clear()
            fleet.index.cleared(worker.worker_id)
    assert seen >= {"first_turn", "new", "changed", "salted", "evicted", "restarted", "held_elsewhere", "partial_block"}
    assert fleet.doctor._turns.num_hashes <= 600
