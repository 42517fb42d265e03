"""Ranks on several machines: the head's port, what is compared when a node arrives, and two nodes on 127.0.0.1."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.base.config import EngineSettings, NodeSettings, RankSettings
from stoker.base.errors import ConfigError, StokerError
from stoker.engine.llm import LLM
from stoker.engine.model_identity import read_hf_config
from stoker.engine.part import ModelSource
from stoker.engine.ranks.connections import rank_facts
from stoker.engine.ranks.head_connection import connect_head
from stoker.engine.ranks.node_gate import NodeGate
from stoker.engine.ranks.node_hello import NodeHello
from stoker.engine.ranks.node_supervisor import NodeFailed, NodeModel, NodeSupervisor
from stoker.engine.ranks.rank_processes import RankProcesses
from stoker.parallel.rank_link import Kind, LinkMessage, RankDismissed, RankLink
from stoker.parallel.rank_watch import RankLost
from tests.parallel.rank_cases import CHANGES, settings
from tests.parallel.test_rank_processes import is_running
from tests.tiny import make_tiny

LONG_S = 60.0
KEY = "ab" * 32
FACTS = {"weights": "aaaa", "version": "1.0", "settings": '{"dtype": "float32", "sched": {"max_rows": 6}}'}


def free_port() -> int:
    """Return a free port below those that the kernel gives to outgoing connections, so that it stays free."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def node_settings(node: int, head: str, count: int = 2, wait_s: float = LONG_S, key: str = KEY) -> EngineSettings:
    engine = settings(RankSettings(count))
    sched = replace(engine.sched, target_itl_ms=1e6)  # as LLM sets it
    return replace(engine, sched=sched, nodes=NodeSettings(count, node, head, wait_s, key))


class Arrivals:
    """Stands for rank 0: takes the ranks that arrive, and what was refused."""

    def __init__(self) -> None:
        self.links: dict[int, RankLink] = {}
        self.refused: list[StokerError] = []

    def arrived(self, rank: int, link: RankLink, came_from: str) -> str | None:
        if rank in self.links:
            return "already here"
        self.links[rank] = link
        link.send_json(Kind.MEET, {"host": "127.0.0.1", "port": 1})
        return None


@contextmanager
def gate(count: int = 2) -> Iterator[tuple[Arrivals, str]]:
    arrivals, head = Arrivals(), f"127.0.0.1:{free_port()}"
    with closing(NodeGate(node_settings(0, head, count), FACTS, arrivals.arrived, arrivals.refused.append)):
        yield arrivals, head
    for link in arrivals.links.values():
        link.close()


def greet(head: str, hello: NodeHello, key: str = KEY, wait_s: float = LONG_S) -> LinkMessage:
    """Arrive as a rank, and return the head's first message."""
    with closing(connect_head(node_settings(1, head, 2, wait_s, key), hello).link) as link:
        return link.receive_order()


HELLO = NodeHello(1, 2, 1, FACTS)


def test_a_node_with_the_same_facts_is_let_in_and_only_once() -> None:
    with gate() as (arrivals, head):
        assert greet(head, HELLO).kind is Kind.MEET
        with pytest.raises(RankDismissed, match="already here"):
            greet(head, HELLO)
        assert list(arrivals.links) == [1]
        assert not arrivals.refused  # the one that arrived first may be the right one


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (replace(HELLO, num_nodes=3), "node 1 was started with --nodes 3, and node 0 with --nodes 2"),
        (replace(HELLO, facts=FACTS | {"weights": "bbbb"}), "in weights: weights is bbbb there, and aaaa on node 0"),
        (replace(HELLO, facts=FACTS | {"version": "2.0"}), "in version: version is 2.0 there, and 1.0 on node 0"),
        (
            replace(HELLO, facts=FACTS | {"settings": '{"dtype": "float32", "sched": {"max_rows": 7}}'}),
            "in settings: sched.max_rows is 7 there, and 6 on node 0",
        ),
        (replace(HELLO, rank=0), "rank 0 came from node 1, which has no such rank"),
        (replace(HELLO, facts={}), "differs from node 0 in settings, version, weights"),
    ],
)
def test_a_node_that_differs_is_refused_on_both_sides(hello: NodeHello, message: str) -> None:
    with gate() as (arrivals, head):
        with pytest.raises(RankDismissed, match=message):
            greet(head, hello)
        until_s = time.monotonic() + LONG_S
        while not arrivals.refused and time.monotonic() < until_s:
            time.sleep(0.01)
        assert message in arrivals.refused[0].message
        assert not arrivals.links


def test_strangers_are_refused_and_do_not_stop_the_start() -> None:
    with gate() as (arrivals, head):
        host, _, port = head.rpartition(":")
        strangers = [
            socket.create_connection((host, int(port))) for _ in range(80)
        ]  # more than may be in the handshake
        for stranger in strangers[::2]:  # the others say nothing
            with suppress(OSError):  # it was replaced by a later one
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        with pytest.raises(ConfigError, match="has another secret; give all nodes the same --secret-file"):
            greet(head, HELLO, key="cd" * 32)
        assert greet(head, HELLO).kind is Kind.MEET
        assert not arrivals.refused
        for stranger in strangers:
            stranger.close()


def test_a_head_that_never_comes_is_an_error_within_the_time() -> None:
    head = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=rf"--head {head} could not be reached within 0.3 s: Connection refused"):
        greet(head, HELLO, wait_s=0.3)


def test_a_head_may_start_later_than_its_nodes() -> None:
    head, arrivals = f"127.0.0.1:{free_port()}", Arrivals()
    gates: list[NodeGate] = []
    timer = threading.Timer(
        0.4, lambda: gates.append(NodeGate(node_settings(0, head), FACTS, arrivals.arrived, arrivals.refused.append))
    )
    timer.start()
    assert greet(head, HELLO).kind is Kind.MEET
    timer.join(LONG_S)
    gates[0].close()
    arrivals.links[1].close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        head = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"--head {head}: node 0 cannot listen there: Address already in use"):
            NodeGate(node_settings(0, head), FACTS, lambda *_: None, lambda error: None)


def test_a_head_that_others_reach_needs_a_secret() -> None:
    no_key = node_settings(0, f"127.0.0.2:{free_port()}")
    no_key = replace(no_key, nodes=replace(no_key.nodes, key=None))
    NodeGate(no_key, FACTS, lambda *_: None, lambda error: None).close()  # only this machine reaches it
    with pytest.raises(ConfigError, match=r"--head 192.0.2.1:7000 without --secret-file"):
        NodeGate(
            replace(no_key, nodes=replace(no_key.nodes, head="192.0.2.1:7000")),
            FACTS,
            lambda *_: None,
            lambda error: None,
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NodeSettings(2, 2, "a:1"), "--node-rank 2 with --nodes 2: nodes are counted from 0 to 1"),
        (lambda: NodeSettings(2, 0), "--nodes 2 needs --head HOST:PORT"),
        (lambda: NodeSettings(2, 0, "0.0.0.0:7000"), "give the address at which the other nodes reach node 0"),
        (lambda: NodeSettings(2, 0, "a:70000"), "the port must be between 1 and 65535"),
        (lambda: NodeSettings(2, 0, "nonsense"), "HOST:PORT, such as 10.0.0.7:7000"),
        (
            lambda: replace(settings(RankSettings(3)), nodes=NodeSettings(2, 0, "a:1")),
            "3 ranks, which cannot be divided",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ---- real ranks


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    make_tiny(folder, "llama-tied", torch.float64, **CHANGES)
    return folder


class OtherNode:
    """Node 1 in a thread: its supervisor, whose ranks are processes."""

    def __init__(self, folder: Path, engine: EngineSettings) -> None:
        self.serving = threading.Semaphore(0)
        self.error: StokerError | None = None
        self.supervisor = NodeSupervisor(NodeModel(folder, engine), self.serving.release)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self.supervisor.run())
        except StokerError as error:
            self.error = error


PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [11] * 20]


def generate_until(llm: LLM, give_up_s: float) -> None:
    while time.monotonic() < give_up_s:
        llm.generate(PROMPTS, max_new_tokens=12)


def test_two_nodes_give_the_answer_of_one_process_and_a_lost_node_comes_back(dense: Path) -> None:
    head = f"127.0.0.1:{free_port()}"
    with closing(LLM(dense, settings())) as alone:
        wanted = [one.token_ids for one in alone.generate(PROMPTS, max_new_tokens=12)]
    other = OtherNode(dense, node_settings(1, head))
    ranks = RankProcesses()
    with closing(LLM(dense, node_settings(0, head), ranks=ranks)) as llm:
        assert [one.token_ids for one in llm.generate(PROMPTS, max_new_tokens=12)] == wanted
        assert other.serving.acquire(timeout=LONG_S)
        (pid,) = other.supervisor.pids.values()
        os.kill(pid, signal.SIGKILL)
        lost_s = time.monotonic()
        with pytest.raises(RankLost, match=r"rank 1 \(node 1, 127.0.0.1:\d+\) is lost: its connection ended"):
            generate_until(llm, lost_s + LONG_S)
        assert time.monotonic() - lost_s < 5.5
    ranks = RankProcesses()
    with closing(
        LLM(dense, node_settings(0, head), ranks=ranks)
    ) as llm:  # as the head's server starts its engine again
        assert [one.token_ids for one in llm.generate(PROMPTS, max_new_tokens=12)] == wanted
        assert other.serving.acquire(timeout=LONG_S)
        (pid,) = other.supervisor.pids.values()
        ranks.dismiss()
    other.thread.join(LONG_S)
    assert not other.thread.is_alive()
    assert other.error is None
    assert not is_running(pid)


def test_nodes_that_never_come_are_named(dense: Path) -> None:
    head = f"127.0.0.1:{free_port()}"
    message = rf"node 1, 2, 3 did not arrive at --head {head} within 0.2 s; start `stoker serve` there with --node-rank 1, 2, 3"
    with pytest.raises(RankLost, match=message):
        LLM(dense, node_settings(0, head, 4, wait_s=0.2))


def test_all_nodes_learn_why_a_start_fails(dense: Path) -> None:
    """Node 2 has another setting. Node 1, which arrived before, is told the same as node 2 and the head."""
    head = f"127.0.0.1:{free_port()}"
    facts = rank_facts(ModelSource(dense, read_hf_config(dense)), node_settings(0, head, 4))
    other = facts | {"settings": facts["settings"].replace('"max_rows": 6', '"max_rows": 7')}
    heard: list[str] = []

    def arrive() -> None:
        for hello in (NodeHello(1, 4, 1, facts), NodeHello(2, 4, 2, other)):
            links.append(connect_head(node_settings(hello.node, head, 4), hello).link)
        for link in links:
            try:
                link.receive_order()
            except RankDismissed as error:
                heard.append(error.message)

    links: list[RankLink] = []
    nodes = threading.Thread(target=arrive)
    nodes.start()
    message = "node 2 differs from node 0 in settings: sched.max_rows is 7 there, and 6 on node 0"
    with pytest.raises(RankLost, match=message):
        LLM(dense, node_settings(0, head, 4))
    nodes.join(LONG_S)
    assert [message in one for one in heard] == [True, True]
    for link in links:
        link.close()


def test_a_node_that_cannot_join_ends_with_the_reason(dense: Path) -> None:
    head = f"127.0.0.1:{free_port()}"
    supervisor = NodeSupervisor(NodeModel(dense, node_settings(1, head, wait_s=0.2)))
    with pytest.raises(NodeFailed, match=rf"--head {head} could not be reached within 0.2 s"):
        asyncio.run(supervisor.run())
    assert not supervisor.pids
