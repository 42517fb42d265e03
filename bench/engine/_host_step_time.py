"""The measuring part of `host_step_time`."""

from __future__ import annotations

import cProfile
import functools
import json
import pstats
import random
import socket
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.contract import Report, Result
from bench.support.model_shapes import LLAMA_8B
from stoker.base import garbage
from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.ids import RequestId
from stoker.engine.build import BuiltEngine, build_engine
from stoker.engine.gpu_steps import step_shapes
from stoker.engine.graphs import StepOutputs, _cost
from stoker.engine.packed import StepData
from stoker.engine.process.block_log import BlockLog
from stoker.engine.process.heartbeat import LoopProgress
from stoker.engine.process.mailbox import MailboxMessage
from stoker.engine.process.main import EngineLoop
from stoker.engine.runner import PendingStep
from stoker.kernels.paged import Cutter
from stoker.proto.messages import Add, Shutdown
from stoker.proto.pipe import EngineEnd
from stoker.sched.plan import StepPlan
from stoker.sched.request import GenerateRequest, SamplingParams

BLOCK_TOKENS, CONTEXT, STEPS = 64, 600, 256
SMALL = LLAMA_8B | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 1000}  # fmt: skip


class InstantDevice:
    """Packs a step's inputs as a GPU's steps do, for Llama-3.1-8B's heads. Its tokens are there at once."""

    def __init__(self, max_rows: int) -> None:
        self._cutter = Cutter(num_kv_heads=8, tile_tokens=32, block_tokens=BLOCK_TOKENS)
        first, rest = step_shapes(max_rows, 2048, self._cutter)
        self._by_cost = sorted((*first, *rest), key=_cost)
        self._sampled = torch.arange(1024) % 997 + 3

    def start(self, plan: StepPlan, samples: bool) -> Callable[[], StepOutputs]:
        data = StepData(plan, self._cutter)
        shape = next((shape for shape in self._by_cost if shape.holds(data.needed)), data.exact)
        packed = torch.zeros(sum(shape.sizes), dtype=torch.int64)
        data.pack(packed.numpy(), shape, samples)
        unused: Any = self._sampled[:0]  # without drafts and logits, only the sampled tokens are read
        outputs = StepOutputs(None, self._sampled, unused, unused, unused, unused, unused)
        return lambda: outputs


class Parts:
    """Seconds spent in some functions, each without the timed functions that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = [0.0]  # seconds in timed calls, by depth

    def time(self, name: str, owner: object, method: str) -> None:
        function: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - start
                self.seconds[name] += elapsed - self._inside.pop()
                self._inside[-1] += elapsed

        setattr(owner, method, timed)


class ScriptedMailbox:
    """Delivers all requests at once, then no message until enough decode-only steps were made."""

    def __init__(self, built: BuiltEngine, requests: Sequence[GenerateRequest], parts: Parts) -> None:
        self._counters = built.scheduler.counters
        self._messages: list[MailboxMessage] = [Add(request=request) for request in requests]
        self._num_rows = len(requests)
        self._parts = parts
        self._computed = 0
        self._began_s = 0.0
        self.steps: list[dict[str, float]] = []

    def warm_up_grammars(self) -> None: ...

    def take(self, wait: bool, timeout_s: float | None = None) -> list[MailboxMessage]:
        step_s = time.perf_counter() - self._began_s
        if self._counters.computed_tokens - self._computed == self._num_rows:
            rest_s = step_s - sum(self._parts.seconds.values())
            self.steps.append({**self._parts.seconds, "rest": rest_s, "total": step_s})
        self._computed = self._counters.computed_tokens
        messages: list[MailboxMessage] = [Shutdown()] if len(self.steps) == STEPS else self._messages
        self._messages = []
        self._parts.seconds.clear()
        self._began_s = time.perf_counter()
        return messages


def build(folder: Path, num_rows: int) -> tuple[BuiltEngine, BlockLog]:
    (folder / "config.json").write_text(json.dumps(SMALL))
    blocks = BlockLog()
    settings = EngineSettings(
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_model_tokens=4096,
        steps_ahead=1,
        kv=KvSettings(BLOCK_TOKENS, 32 * num_rows),
        sched=SchedSettings(step_tokens=8192, max_rows=num_rows),
    )
    built = build_engine(folder, settings, observer=blocks, random_weights_seed=0)
    runner = built.engine._runner
    runner._gpu_steps = InstantDevice(num_rows)  # type: ignore[assignment]
    runner._kv.clear = lambda blocks, kv_set: None  # type: ignore[method-assign]  # a GPU clears nothing here either
    return built, blocks


def make_requests(num_rows: int) -> list[GenerateRequest]:
    """Prompts of BLOCK_TOKENS different lengths, so that some blocks fill in every step."""
    rng = random.Random(0)
    requests = []
    for number in range(num_rows):
        token_ids = [rng.randrange(1000) for _ in range(CONTEXT + number % BLOCK_TOKENS)]
        name = RequestId(f"chatcmpl-{rng.getrandbits(128):032x}")
        sampling = SamplingParams(temperature=0.0, stop_token_ids=(1, 2))
        requests.append(GenerateRequest(name, token_ids, len(token_ids), sampling, 2 * STEPS))
    return requests


def measure(num_rows: int, with_profile: bool) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        built, blocks = build(Path(folder), num_rows)
    ours, theirs = socket.socketpair()
    server = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
    theirs.close()
    pipe, parts, profile = EngineEnd(ours), Parts(), cProfile.Profile()
    mailbox = ScriptedMailbox(built, make_requests(num_rows), parts)
    loop = EngineLoop(built, blocks, mailbox, pipe, LoopProgress())  # type: ignore[arg-type]
    if not with_profile:
        parts.time("plan", built.scheduler, "plan")
        parts.time("launch", built.engine._runner, "launch")
        parts.time("read", PendingStep, "wait")
        parts.time("commit", built.scheduler, "commit")
        parts.time("step, other", built.engine, "step")
        parts.time("stats", loop, "_send_due_stats")
        parts.time("send", pipe, "send")
    garbage.tune_for_serving()
    if with_profile:
        profile.enable()
    loop.run()
    profile.disable()
    if with_profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    built.close()
    ours.shutdown(socket.SHUT_RDWR)
    server.wait()
    names = sorted(set().union(*mailbox.steps), key=list(mailbox.steps[0]).index)
    medians = {name: statistics.median(step.get(name, 0.0) for step in mailbox.steps) for name in names}
    case = f"decode-only step, {num_rows} rows"
    return Report(
        [Result(case, f"host time, {name}", "us", 1e6 * value) for name, value in medians.items()], mailbox.steps
    )
