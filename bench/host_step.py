"""What the host does for a step that only decodes, by part, without a card: the real loop, scheduler, packing and pipe around a
card that has drawn before anybody asks.

    python bench/host_step.py [--rows 256] [--profile]

Every row decodes from 600 tokens of context on, in blocks of 64, one step ahead of the card. Microseconds, the median over 256
steps; a card's own calls are not in them.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import pstats
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
from shapes import LLAMA_8B  # noqa: E402

from stoker.base import garbage  # noqa: E402
from stoker.base.config import EngineSettings, KvSettings, SchedSettings  # noqa: E402
from stoker.base.ids import RequestId  # noqa: E402
from stoker.engine.build import BuiltEngine, build_engine  # noqa: E402
from stoker.engine.gpu_steps import _shapes  # noqa: E402
from stoker.engine.graphs import StepOutputs, _cost  # noqa: E402
from stoker.engine.packed import StepData  # noqa: E402
from stoker.engine.process.block_log import BlockLog  # noqa: E402
from stoker.engine.process.mailbox import MailboxMessage  # noqa: E402
from stoker.engine.process.main import EngineLoop  # noqa: E402
from stoker.engine.runner import PendingStep  # noqa: E402
from stoker.kernels.paged import Cutter  # noqa: E402
from stoker.proto.messages import Add, Shutdown  # noqa: E402
from stoker.proto.pipe import EngineEnd  # noqa: E402
from stoker.sched.plan import StepPlan  # noqa: E402
from stoker.sched.request import GenerateRequest, SamplingParams  # noqa: E402

BLOCK_TOKENS, CONTEXT, STEPS = 64, 600, 256
SMALL = LLAMA_8B | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 1000}  # fmt: skip


class InstantGpu:
    """Packs a step's inputs as GpuSteps does, for Llama-3.1-8B's heads. Its tokens are there at once."""

    def __init__(self, max_rows: int) -> None:
        self._cutter = Cutter(num_kv_heads=8, tile_tokens=32, block_tokens=BLOCK_TOKENS)
        first, rest = _shapes(max_rows, 2048, self._cutter)
        self._by_cost = sorted((*first, *rest), key=_cost)
        self._sampled = torch.arange(1024) % 997 + 3

    def run(self, plan: StepPlan, samples: bool) -> StepOutputs:
        data = StepData(plan, self._cutter)
        shape = next((shape for shape in self._by_cost if shape.holds(data.least)), data.exact)
        packed = torch.zeros(sum(shape.sizes), dtype=torch.int64)
        data.pack(packed.numpy(), shape, samples)
        return StepOutputs(None, self._sampled)


class Parts:
    """Seconds spent in some functions, each without those of the others that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = [0.0]  # of timed calls, by depth

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


class Script:
    """A mailbox: all requests at once, then nothing until enough steps have only decoded."""

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
    runner._gpu_steps = InstantGpu(num_rows)  # type: ignore[assignment]
    runner._kv.clear = lambda blocks: None  # type: ignore[method-assign]  # a card does that by itself, too
    return built, blocks


def make_requests(num_rows: int) -> list[GenerateRequest]:
    """Prompts of as many lengths as a block has tokens: some blocks fill in every step."""
    rng = random.Random(0)
    requests = []
    for number in range(num_rows):
        token_ids = [rng.randrange(1000) for _ in range(CONTEXT + number % BLOCK_TOKENS)]
        name = RequestId(f"chatcmpl-{rng.getrandbits(128):032x}")
        sampling = SamplingParams(temperature=0.0, stop_token_ids=(1, 2))
        requests.append(GenerateRequest(name, token_ids, len(token_ids), sampling, 2 * STEPS))
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built, blocks = build(Path(folder), args.rows)
    ours, theirs = socket.socketpair()
    server = subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL)
    theirs.close()
    pipe, parts, profile = EngineEnd(ours), Parts(), cProfile.Profile()
    script = Script(built, make_requests(args.rows), parts)
    loop = EngineLoop(built, blocks, script, pipe)  # type: ignore[arg-type]
    if not args.profile:
        parts.time("plan", built.scheduler, "plan")
        parts.time("launch", built.engine._runner, "launch")
        parts.time("read", PendingStep, "wait")
        parts.time("commit", built.scheduler, "commit")
        parts.time("step, other", built.engine, "step")
        parts.time("stats", loop, "_send_due_stats")
        parts.time("send", pipe, "send")
    garbage.tune_for_serving()
    if args.profile:
        profile.enable()
    loop.run()
    profile.disable()
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    for name in sorted(set().union(*script.steps), key=list(script.steps[0]).index):
        figure = statistics.median(step.get(name, 0.0) for step in script.steps)
        print(f"{name:12} {1e6 * figure:8.0f} us")
    built.close()
    ours.shutdown(socket.SHUT_RDWR)
    server.wait()


if __name__ == "__main__":
    main()
