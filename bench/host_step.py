"""What the host does for a step that only decodes, by part, without a card: the real loop, scheduler, packing and pipe around a
card that has drawn before anybody asks.

    python bench/host_step.py [--rows 256] [--profile]

Every row decodes from 600 tokens of context on, in blocks of 64, one step ahead of the card. Microseconds, the median over 256
steps; `launch` is without what the card's own calls take.
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

from stoker.base import collector  # noqa: E402
from stoker.base.config import EngineSettings, KvSettings, SchedSettings  # noqa: E402
from stoker.base.ids import RequestId  # noqa: E402
from stoker.engine.build import BuiltEngine, build_engine  # noqa: E402
from stoker.engine.card import _shapes  # noqa: E402
from stoker.engine.graphs import StepOutputs, _cost  # noqa: E402
from stoker.engine.packed import StepData  # noqa: E402
from stoker.engine.runner import PendingStep  # noqa: E402
from stoker.kernels.paged import Cutter  # noqa: E402
from stoker.proto.messages import Add, Shutdown  # noqa: E402
from stoker.proto.pipe import EngineEnd  # noqa: E402
from stoker.sched.plan import Span, StepPlan  # noqa: E402
from stoker.sched.request import GenerateRequest, SamplingParams  # noqa: E402
from stoker.worker.block_log import BlockLog  # noqa: E402
from stoker.worker.engine_process import EngineLoop, Message  # noqa: E402

BLOCK_TOKENS, CONTEXT, STEPS = 64, 600, 256
SMALL = LLAMA_8B | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 1000}  # fmt: skip


class DrawnCard:
    """Packs a step's inputs as CardSteps does, for Llama-3.1-8B's heads. Its tokens are there at once."""

    def __init__(self, max_rows: int) -> None:
        self._cutter = Cutter(num_kv_heads=8, tile_tokens=32, block_tokens=BLOCK_TOKENS)
        first, rest = _shapes(max_rows, self._cutter)
        self._by_cost = sorted((*first, *rest), key=_cost)
        self._drawn = torch.arange(1024) % 997 + 3

    def run(self, plan: StepPlan, sampling: Sequence[Span], draws: bool) -> StepOutputs:
        data = StepData(plan, sampling, self._cutter, [2048])
        shape = next((shape for shape in self._by_cost if shape.holds(data.least)), data.exact)
        packed = torch.zeros(sum(shape.sizes), dtype=torch.int64)
        data.pack(packed.numpy(), shape, draws)
        return StepOutputs(None, self._drawn)


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
    """A mailbox: all requests at once, then nothing until they have been measured."""

    def __init__(self, requests: Sequence[GenerateRequest], parts: Parts) -> None:
        self._messages: list[Message] = [Add(request=request) for request in requests]
        self._parts = parts
        self._at_s = 0.0
        self.steps: list[dict[str, float]] = []
        self.profile: cProfile.Profile | None = None

    def warm_up(self) -> None: ...

    def take(self, wait: bool, timeout_s: float | None = None) -> list[Message]:
        now = time.perf_counter()
        whole = now - self._at_s
        self.steps.append({**self._parts.seconds, "rest": whole - sum(self._parts.seconds.values()), "total": whole})
        self._parts.seconds.clear()
        messages, self._messages = self._messages, []
        # The first chunks come before the last prompts: steps that only decode are those at the end.
        if self.profile is not None and len(self.steps) == CONTEXT // 2:
            self.profile.enable()
        self._at_s = time.perf_counter()
        return messages


def build(folder: Path, rows: int) -> tuple[BuiltEngine, BlockLog]:
    (folder / "config.json").write_text(json.dumps(SMALL))
    blocks = BlockLog()
    settings = EngineSettings(
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_model_tokens=4096,
        steps_ahead=1,
        kv=KvSettings(BLOCK_TOKENS, rows * 32),
        sched=SchedSettings(step_tokens=8192, max_rows=rows),
    )
    return build_engine(folder, settings, observer=blocks, random_weights_seed=0), blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    rng = random.Random(0)
    num_new = 2 * STEPS
    requests = [
        GenerateRequest(
            RequestId(f"chatcmpl-{rng.getrandbits(128):032x}"),
            [rng.randrange(1000) for _ in range(CONTEXT + rng.randrange(-32, 32))],
            CONTEXT - 32,
            SamplingParams(temperature=0.0, stop_token_ids=(1, 2)),
            num_new,
        )
        for _ in range(args.rows)
    ]
    with tempfile.TemporaryDirectory() as folder:
        built, blocks = build(Path(folder), args.rows)
