"""Two stages of a pipeline against one process, on a CPU: processes of one thread each.

A step of n sequences takes T(n) in one process. Two stages have two steps of n/2 sequences in flight, and each stage takes half
of T(n/2). So at best, two stages are T(n) / T(n/2) times as fast. Prompts are computed in chunks, which follow each other through
the stages; at best, two stages are twice as fast.

Cases alternate, and the best round of each counts, because other programs on the machine only make it slower. The notes have the
load average. On a busy machine, ranks wait for a core and not for each other. So the CPU time of the busier rank is reported too:
what the time would be if every rank had a core of its own and never waited.

Two busy cores share caches and memory, so each is slower than one alone, and T is measured with one. The third comparison shows
how much that is: it is with two processes that each have the whole model, compute half of the work, and never wait for the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import Needs, Report, Result
from bench.engine._independent_process import IndependentProcess

if TYPE_CHECKING:
    from stoker.engine.llm import LLM

NAME = "pipeline_stages"
HELP = "decode and prefill rate of two pipeline stages against one process, with one thread each"
NEEDS = Needs(packages=("torch",))
_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
_PROMPT_TOKENS = 16
_CHUNK_TOKENS = 256
_PREFILL_TOKENS = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64], help="sequences; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=24, help="tokens per sequence in a round; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(_MODEL))
        open_one = partial(open_engine, Path(name), 1)
        one, two = open_one(), open_engine(Path(name), 2)
        other = IndependentProcess(open_one, partial(work, num_tokens=args.tokens))
        try:
            return measure(args, one, two, other)
        finally:
            other.close()
            one.close()
            two.close()


def work(llm: LLM, count: int, num_tokens: int) -> None:
    """Decode `count` sequences. If that is -1, compute a prompt."""
    if count < 0:
        prefill(llm)
    else:
        decode(llm, count, num_tokens)


def measure(args: argparse.Namespace, one: LLM, two: LLM, other: IndependentProcess) -> Report:
    best: dict[str, Spent] = {}
    for _ in range(args.rounds):
        for count in args.batches:
            keep(best, f"one {count}", decode(one, count, args.tokens))
            keep(best, f"half {count}", decode(one, count // 2, args.tokens))
            keep(best, f"two {count}", decode(two, count, args.tokens))
            with other.working(count // 2):
                keep(best, f"independent {count}", decode(one, count // 2, args.tokens))
        keep(best, "one prefill", prefill(one))
        keep(best, "two prefill", prefill(two))
        with other.working(-1):
            keep(best, "independent prefill", prefill(one))
    notes = f"load average {os.getloadavg()[0]:.1f}"
    results = []
    for field, metric in (("wall_s", "rate of two stages"), ("cpu_s", "the same by CPU time of the busier rank")):
        spent = {case: getattr(one, field) for case, one in best.items()}
        for count in args.batches:
            tokens = count * args.tokens
            ideal_s = spent[f"half {count}"]  # two stages compute two halves of the batch in this time
            faster = f"{spent[f'one {count}'] / spent[f'two {count}']:.2f} times one process; {notes}"
            results.append(
                Result(
                    f"decode, {count} sequences", metric, "tokens/s", tokens / spent[f"two {count}"], "higher",
                    "T(n) / T(n/2) times one process", tokens / ideal_s, "baseline", faster, 0.9,
                )
            )  # fmt: skip
        results.append(
            Result(
                f"prompt of {_PREFILL_TOKENS} tokens", metric, "tokens/s", _PREFILL_TOKENS / spent["two prefill"], "higher",
                "one process", _PREFILL_TOKENS / spent["one prefill"], "baseline", notes, 1.7,
            )
        )  # fmt: skip
    for count in args.batches:
        results.append(independent(f"decode, {count} sequences", count * args.tokens, best, str(count), 1.0, notes))
    results.append(independent(f"prompt of {_PREFILL_TOKENS} tokens", _PREFILL_TOKENS, best, "prefill", 2.0, notes))
    return Report(results, {case: asdict(one) for case, one in best.items()})


def independent(case: str, tokens: int, best: dict[str, Spent], key: str, parts: float, notes: str) -> Result:
    """Compare with two processes that never wait for each other. Each computes as much as two stages do in all if `parts` is 2,
    and half of that if it is 1."""
    together = parts * tokens / best[f"independent {key}"].wall_s
    rate = tokens / best[f"two {key}"].wall_s
    metric, whom = "rate of two stages, both cores busy", "two independent processes"
    return Result(case, metric, "tokens/s", rate, "higher", whom, together, "baseline", notes)


@dataclass(frozen=True)
class Spent:
    """The time of one round, and the CPU time of the rank that took the most."""

    wall_s: float
    cpu_s: float

    @classmethod
    def since(cls, llm: LLM, wall_s: float, cpu_s: list[float]) -> Spent:
        found = zip(cpu_times(llm), cpu_s, strict=True)
        return cls(time.perf_counter() - wall_s, max(now - before for now, before in found))


def cpu_times(llm: LLM) -> list[float]:
    """Return the CPU time of each rank, this process first."""
    times, ticks = [time.process_time()], os.sysconf("SC_CLK_TCK")
    for pid in getattr(llm.built.ranks, "pids", {}).values():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        times.append((int(fields[11]) + int(fields[12])) / ticks)
    return times


def keep(best: dict[str, Spent], case: str, spent: Spent) -> None:
    before = best.get(case, spent)
    best[case] = Spent(min(spent.wall_s, before.wall_s), min(spent.cpu_s, before.cpu_s))


def open_engine(folder: Path, stages: int) -> LLM:
    from stoker.base.config import EngineSettings, KvSettings, RankSettings, SchedSettings
    from stoker.engine.llm import LLM

    settings = EngineSettings(
        device="cpu",
        num_threads=1,
        drafter="off",
        max_model_tokens=_PREFILL_TOKENS + 8,
        kv=KvSettings(block_tokens=16, num_blocks=1024),
        sched=SchedSettings(step_tokens=_CHUNK_TOKENS, max_rows=64),
        ranks=RankSettings(pp=stages),
    )
    return LLM(folder, settings, random_weights_seed=0)


def decode(llm: LLM, count: int, num_tokens: int) -> Spent:
    """Return the time in which all sequences decode `num_tokens` tokens, after they have been prefilled."""
    requests = [request(number, _PROMPT_TOKENS, num_tokens + 9) for number in range(count)]
    for one in requests:
        llm.built.engine.add(one)
    done = dict.fromkeys((one.request_id for one in requests), 0)

    def step_until(wanted: int) -> None:
        while min(done.values()) < wanted:
            for chunk in llm.built.engine.step():
                done[chunk.request_id] += len(chunk.token_ids)

    step_until(4)
    started = time.perf_counter(), cpu_times(llm)
    step_until(4 + num_tokens)
    spent = Spent.since(llm, *started)
    finish(llm)
    return spent


def prefill(llm: LLM) -> Spent:
    llm.built.engine.add(request(random.getrandbits(40), _PREFILL_TOKENS, 1))
    started = time.perf_counter(), cpu_times(llm)
    finish(llm)
    return Spent.since(llm, *started)


def finish(llm: LLM) -> None:
    while llm.built.engine.has_work:
        llm.built.engine.step()


def request(number: int, num_prompt: int, max_new_tokens: int) -> Any:
    from stoker.base.ids import RequestId
    from stoker.sched.request import GenerateRequest, SamplingParams

    rng = random.Random(number)
    token_ids = [rng.randrange(_MODEL["vocab_size"]) for _ in range(num_prompt)]
    sampling = SamplingParams(temperature=0.0)
    return GenerateRequest(RequestId(str(rng.getrandbits(60))), token_ids, num_prompt, sampling, max_new_tokens)
