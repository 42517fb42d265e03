"""The measuring part of `oracle_speculation`, for Stoker. Imports torch: import this module inside `run`.

One engine measures everything. What a step verifies is switched between runs, so `off` uses the same captured graphs as a run
with drafts. With exact numerics, these are also the graphs of an engine without a drafter.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.support.decode_window import measure_window
from bench.support.offline_engines import SEED
from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.ids import RequestId
from stoker.engine.llm import LLM
from stoker.sched.drafting import Drafting, NoDrafting
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.sequence import Sequence
from stoker.sched.step_costs import StepCosts
from stoker.spec.draft_counts import DraftCounts
from stoker.spec.drafter import DrafterParts, build_drafter
from stoker.spec.tape_drafting import TapeDrafting

_SOURCE = "oracle"
_WARM_TOKENS = 24


class SwitchedDrafting(NoDrafting):
    """Passes everything on to the drafting that is measured now."""

    def __init__(self) -> None:
        self.current: Drafting = NoDrafting()

    @property
    def uses_costs(self) -> bool:  # type: ignore[override]
        return self.current.uses_costs

    @property
    def num_guesses(self) -> int:  # type: ignore[override]
        return self.current.num_guesses

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        return self.current.plan(seqs, budget, costs)

    def launched(self, seqs: Iterable[Sequence]) -> None:
        self.current.launched(seqs)

    def committed(self, seq: Sequence, num_drafts: int, token_ids: list[int]) -> None:
        self.current.committed(seq, num_drafts, token_ids)

    def dropped(self, seq: Sequence) -> None:
        self.current.dropped(seq)

    def suggested(self, seq: Sequence, token_ids: list[int]) -> None:
        self.current.suggested(seq, token_ids)

    def ended(self, seq: Sequence) -> None:
        self.current.ended(seq)


class FixedLength(SwitchedDrafting):
    """Verifies the same number of drafts of each sequence in every step, as far as there are any. 0: no drafts."""

    def __init__(self, drafting: Drafting, length: int) -> None:
        self.current = drafting
        self._length = length

    @property
    def uses_costs(self) -> bool:  # type: ignore[override]
        return False

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        if not self._length:
            return {}
        # Without costs every draft pays, so the budget alone limits them.
        planned = self.current.plan(seqs, min(budget, self._length * len(seqs)), StepCosts())
        return {seq: min(length, self._length) for seq, length in planned.items()}


class FixedGuesses(NoDrafting):
    """A draft model makes the same number of guesses after each step, and the next step verifies all of them."""

    def __init__(self, number: int, counts: DraftCounts) -> None:
        self.num_guesses = number
        self._counts = counts

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        return dict.fromkeys(seqs, min(self.num_guesses, budget // max(1, len(seqs))))

    def committed(self, seq: Sequence, num_drafts: int, token_ids: list[int]) -> None:
        self._counts.record("eagle3", num_drafts, len(token_ids) - 1)


@dataclass(frozen=True, slots=True)
class Counted:
    """Totals at one moment of a run."""

    drafted_at: list[int]
    accepted_at: list[int]
    num_steps: int
    num_replays: int


@dataclass(slots=True)
class GraphTimes:
    """When each captured step of a GPU began and ended. Two events per step, which take the GPU about 2 us."""

    replays: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def watch(self, llm: LLM) -> None:
        steps = getattr(llm.built.engine._runner, "_gpu_steps", None)
        if steps is None:
            return
        find = steps._graphs.find

        def found(needed: Any) -> _TimedStep | None:
            captured = find(needed)
            return None if captured is None else _TimedStep(captured, self.replays)

        steps._graphs.find = found

    def step_ms(self, first: int, last: int) -> float | None:
        """Return the median GPU time of some of the replays."""
        times = [start.elapsed_time(end) for start, end in self.replays[first:last]]
        return median(times) if times else None

    def idle_share(self, first: int, last: int) -> float | None:
        """Return the share of the time in which the GPU computes none of these replays. Work outside of graphs, such as the
        copy of the sampled tokens, counts as idle."""
        replays = self.replays[first:last]
        if not replays:
            return None
        busy_ms = sum(start.elapsed_time(end) for start, end in replays)
        all_ms: float = replays[0][0].elapsed_time(replays[-1][1])
        return 1.0 - busy_ms / all_ms


@dataclass(frozen=True, slots=True)
class _TimedStep:
    """A captured step that records an event before and after it."""

    captured: Any
    replays: list[tuple[torch.cuda.Event, torch.cuda.Event]]

    @property
    def shape(self) -> Any:
        return self.captured.shape

    def run(self, packed: torch.Tensor, num_guesses: int) -> Any:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        outputs = self.captured.run(packed, num_guesses)
        end.record()
        self.replays.append((start, end))
        return outputs


def settings(args: Any, drafter: str, numerics: str) -> EngineSettings:
    """Return the engine's settings. Steps with prompts are small, so that few graphs have to be captured."""
    return EngineSettings(
        device=args.device,
        dtype=args.dtype,
        num_threads=args.threads,
        max_model_tokens=args.max_model_tokens,
        drafter=drafter,
        numerics=numerics,
        kv=KvSettings(memory_gib=args.kv_memory_gib),
        sched=SchedSettings(
            max_rows=max(args.max_rows, *args.batches), step_tokens=max(args.step_tokens, *args.batches)
        ),
    )


class Runs:
    """Runs of one engine. Every answer is compared with the first one to the same prompt."""

    def __init__(self, args: Any, folder: Path, drafter: str, numerics: str) -> None:
        self._switch = SwitchedDrafting()
        weights_seed = SEED if args.random_weights else None
        self.llm = LLM(
            folder,
            settings(args, drafter, numerics),
            random_weights_seed=weights_seed,
            wrap_drafting=lambda _: self._switch,
        )
        self._num_out, self._acceptance = args.decode_tokens, args.acceptance
        rng, vocab = random.Random(SEED), min(48_000, self.llm.built.vocab_size)
        self._prompts = [
            [rng.randrange(10, vocab) for _ in range(args.prompt_tokens)] for _ in range(max(args.batches))
        ]
        self._first: dict[int, list[int]] = {}
        self._times = GraphTimes()
        self._times.watch(self.llm)
        self._num_runs = 0
        self._oracles: dict[float, Any] = {}

    @property
    def max_heads(self) -> int:
        """The most tokens of a step whose logits are computed."""
        return max(self.llm.built.settings.max_rows, 64)

    def oracle(self, acceptance: float, counts: DraftCounts) -> TapeDrafting:
        """Return a drafting with its own estimates. The answers that the oracle knows are kept."""
        drafter = self._oracle(acceptance)
        return TapeDrafting({_SOURCE: drafter}, counts)

    def off(self, *remembering: float) -> FixedLength:
        """Return a drafting without drafts. The oracles of these acceptances remember the answers."""
        oracles = {f"{_SOURCE} {rate}": self._oracle(rate) for rate in remembering}
        return FixedLength(TapeDrafting(oracles, DraftCounts()), 0)

    def _oracle(self, acceptance: float) -> Any:
        if acceptance not in self._oracles:
            parts = DrafterParts(self.llm.built.pool, self.llm.built.vocab_size, str(acceptance))
            self._oracles[acceptance] = build_drafter(_SOURCE, parts)
        return self._oracles[acceptance]

    def warm_up(self, batch: int) -> None:
        """Run the batch once for a few tokens."""
        self._switch.current = NoDrafting()
        sampling = SamplingParams(temperature=0.0)
        self.llm.generate(self._prompts[:batch], sampling, min(_WARM_TOKENS, self._num_out))

    def measure(
        self, batch: int, drafts: str, drafting: Drafting, counts: DraftCounts, acceptance: float
    ) -> dict[str, Any]:
        """Run the first `batch` prompts. Rates are corrected to the exact acceptance; `luck` is what the correction divides
        by."""
        self._switch.current = drafting
        self._times.replays.clear()
        answers: list[list[int]] = [[] for _ in range(batch)]
        engine = self.llm.built.engine

        def count() -> Counted:
            by_source = list(counts.by_source.values())
            drafted = [sum(numbers) for numbers in zip(*(one.drafted_at for one in by_source), strict=True)]
            accepted = [sum(numbers) for numbers in zip(*(one.accepted_at for one in by_source), strict=True)]
            return Counted(drafted, accepted, engine.num_steps, len(self._times.replays))

        window = measure_window(self._steps(answers), batch, self._num_out, count)
        before, after = window.before, window.after
        drafted, accepted = _grown(before.drafted_at, after.drafted_at), _grown(before.accepted_at, after.accepted_at)
        num_rows = window.tokens - sum(accepted)
        expected = num_rows + sum(number * acceptance**at for at, number in enumerate(drafted, start=1))
        num_steps = after.num_steps - before.num_steps
        replays = before.num_replays, after.num_replays
        differing = sum(self._first.setdefault(at, answer) != answer for at, answer in enumerate(answers))
        return {
            "batch": batch,
            "drafts": drafts,
            "tokens_per_s": expected / window.seconds,
            "luck": window.tokens / expected,
            "tokens_per_row": expected / max(1, num_rows),
            "drafts_per_row": sum(drafted) / max(1, num_rows),
            "wall_step_ms": window.seconds / max(1, num_steps) * 1e3,
            "step_ms": self._times.step_ms(*replays),
            "idle_share": self._times.idle_share(*replays),
            "num_steps": num_steps,
            "differing": differing,
        }

    def _steps(self, answers: list[list[int]]) -> Iterator[dict[int, int]]:
        """Run the first prompts, one for each list of `answers`. Yield the new tokens of each step by sequence."""
        self._num_runs += 1
        engine, numbers = self.llm.built.engine, dict[RequestId, int]()
        for number in range(len(answers)):
            request_id = RequestId(f"{self._num_runs}-{number}")
            numbers[request_id] = number
            prompt = list(self._prompts[number])
            engine.add(GenerateRequest(request_id, prompt, len(prompt), SamplingParams(temperature=0.0), self._num_out))
        while engine.has_work:
            new: dict[int, int] = {}
            for chunk in engine.step():
                number = numbers[chunk.request_id]
                answers[number] += chunk.token_ids
                new[number] = new.get(number, 0) + len(chunk.token_ids)
            yield new

    def close(self) -> None:
        self.llm.close()


def _grown(before: list[int], after: list[int]) -> list[int]:
    """Return the increase of each count. A source that was not counted before has no counts."""
    return [number - (before[at] if at < len(before) else 0) for at, number in enumerate(after)]


def measure_oracle(args: Any, folder: Path) -> list[dict[str, Any]]:
    """Measure off, each fixed number of drafts, the controller, the controller with wrong drafts, and off again."""
    found: list[dict[str, Any]] = []
    runs = Runs(args, folder, _SOURCE, "exact")

    def run(batch: int, drafts: str, drafting: Drafting, counts: DraftCounts, acceptance: float) -> None:
        found.append(runs.measure(batch, drafts, drafting, counts, acceptance))
        tell(found[-1])

    for batch in args.batches:
        runs.warm_up(batch)
        rate = args.acceptance
        run(batch, "off", runs.off(rate, 0.0), DraftCounts(), rate)
        for length in args.drafts:
            if batch * (1 + length) <= runs.max_heads:
                counts = DraftCounts()
                run(batch, str(length), FixedLength(runs.oracle(rate, counts), length), counts, rate)
        for name, acceptance in (("auto", rate), ("auto, all wrong", 0.0)):
            counts = DraftCounts()
            run(batch, name, runs.oracle(acceptance, counts), counts, acceptance)
        run(batch, "off", runs.off(rate, 0.0), DraftCounts(), rate)
    runs.close()
    return found


def measure_off(args: Any, folder: Path, numerics: str) -> list[dict[str, Any]]:
    """Measure an engine without a drafter."""
    found = []
    runs = Runs(args, folder, "off", numerics)
    for batch in args.batches:
        runs.warm_up(batch)
        for _ in range(2):
            found.append(runs.measure(batch, "off", NoDrafting(), DraftCounts(), 0.0))
            tell(found[-1])
    runs.close()
    return found


def measure_head(args: Any, folder: Path, head: Path) -> list[dict[str, Any]]:
    """Measure a head with random weights, at fixed numbers of guesses. The time of a step does not depend on acceptance."""
    found = []
    runs = Runs(args, folder, f"eagle3:{head}", "exact")
    for batch in args.batches:
        runs.warm_up(batch)
        for length in args.eagle3_drafts:
            if batch * (1 + length) <= runs.max_heads:
                counts = DraftCounts()
                found.append(runs.measure(batch, str(length), FixedGuesses(length, counts), counts, args.acceptance))
                tell(found[-1])
    runs.close()
    return found


def tell(run: Mapping[str, Any]) -> None:
    """Print a run as soon as it is measured: a run of all batches may be cut off."""
    shown = (f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in run.items())
    print(" ".join(shown), flush=True)
