"""With 8-bit weights on a CPU, KV and logits have the same bits however a prompt is cut into chunks and batched. Rounding
activations to 8 bits would turn a difference in the last bit into another answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.base.config import EngineSettings, KvSettings
from stoker.base.ids import BlockId, Row
from stoker.engine.build import BuiltEngine, build_engine
from stoker.engine.cpu_weights import measure
from stoker.engine.grammar import NoGrammars
from stoker.engine.inputs import build_inputs
from stoker.engine.llm import LLM
from stoker.engine.rows import RowTable
from stoker.kv.device.device_kv import DeviceKv
from stoker.sched.plan import BlockTableChange, NewRow, Span, StepPlan
from stoker.sched.request import SamplingParams

SEED = 18
CPU = torch.device("cpu")
LENGTHS = (203, 90, 47)
Schedule = list[list[tuple[int, int]]]  # for each step, the prompts in it and how many of their tokens


class Prompts:
    """Several prompts in one KV cache, computed step by step."""

    def __init__(self, built: BuiltEngine, prompts: Sequence[Sequence[int]]) -> None:
        block_tokens = built.layout.block_tokens
        self._model, self._prompts = built.model, prompts
        self._heads = built.model.layers[0].attention.num_heads
        counts = [-(-len(prompt) // block_tokens) for prompt in prompts]
        places = [BlockId(i) for i in range(sum(counts))]
        random.Random(len(prompts)).shuffle(places)
        self._blocks = [[places.pop() for _ in range(count)] for count in counts]
        self._kv = DeviceKv(built.layout, sum(counts), CPU)
        self._rows = RowTable(len(prompts), max(counts), built.vocab_size, CPU, NoGrammars())
        self._rows.apply(StepPlan([], [], new_rows=list(self._new_rows()), block_table_changes=list(self._tables())))

    def _new_rows(self) -> Iterator[NewRow]:
        for number, prompt in enumerate(self._prompts):
            yield NewRow(Row(number), SamplingParams(), list(prompt), len(prompt), 1)

    def _tables(self) -> Iterator[BlockTableChange]:
        for number, blocks in enumerate(self._blocks):
            yield BlockTableChange(Row(number), 0, blocks)

    @torch.inference_mode()
    def run(self, schedule: Schedule) -> tuple[list[Tensor], list[Tensor]]:
        """Return the logits and the KV of each prompt."""
        done = [0] * len(self._prompts)
        logits: list[list[Tensor]] = [[] for _ in self._prompts]
        for step in schedule:
            spans = [Span(Row(number), done[number], count, False) for number, count in step]
            tokens = [self._prompts[span.row][span.start + i] for span in spans for i in range(span.count)]
            batch = build_inputs(StepPlan(spans, tokens), self._rows, self._kv, grid_heads=self._heads).batch
            found = self._model.logits(self._model(batch)).split([count for _, count in step])
            for (number, count), rows in zip(step, found, strict=True):
                logits[number].append(rows)
                done[number] += count
        return [torch.cat(rows) for rows in logits], [self._kv.blocks[blocks] for blocks in self._blocks]


def schedules(generator: random.Random) -> Iterator[tuple[str, Schedule]]:
    for chunk in (7, 16, 33):
        steps = [[(i, min(chunk, n - at))] for i, n in enumerate(LENGTHS) for at in range(0, n, chunk)]
        yield f"chunks of {chunk}", steps
    for number in range(2):
        left, steps = list(LENGTHS), []
        while any(left):
            step = []
            for i in generator.sample(range(len(left)), len(left)):
                if count := min(left[i], generator.choice([0, 1, 1, 1, 16, generator.randint(2, 90)])):
                    step.append((i, count))
                    left[i] -= count
            steps += [step] if step else []
        yield f"mixed steps {number}", steps


@pytest.fixture(scope="module")
def built(smollm2: Path) -> BuiltEngine:
    if not any(name != "float32" for name in measure(64, 64)):
        pytest.skip("no 8-bit kernel is exact on this CPU")
    return build_engine(smollm2, EngineSettings(device="cpu", cpu_weights="int8", kv=KvSettings(num_blocks=64)))


def test_chunks_batches_and_threads_do_not_change_a_bit(built: BuiltEngine) -> None:
    print(f"seed {SEED}")
    generator = random.Random(SEED)
    prompts = [[generator.randrange(built.vocab_size) for _ in range(length)] for length in LENGTHS]
    logits, kv = Prompts(built, prompts).run([[(number, length)] for number, length in enumerate(LENGTHS)])
    threads = torch.get_num_threads()
    try:
        for number, (name, schedule) in enumerate(schedules(generator)):
            torch.set_num_threads(1 + number % 2)
            found_logits, found_kv = Prompts(built, prompts).run(schedule)
            for prompt in range(len(prompts)):
                assert torch.equal(found_kv[prompt], kv[prompt]), f"KV of prompt {prompt}, {name}"
                assert torch.equal(found_logits[prompt], logits[prompt]), f"logits of prompt {prompt}, {name}"
    finally:
        torch.set_num_threads(threads)


def test_cached_prefixes_batches_and_resumed_answers_do_not_change_a_token(smollm2: Path, built: BuiltEngine) -> None:
    print(f"seed {SEED}")
    generator = random.Random(SEED)
    prompts = [[generator.randrange(built.vocab_size) for _ in range(length)] for length in LENGTHS]
    settings = EngineSettings(device="cpu", cpu_weights="int8", kv=KvSettings(num_blocks=200))
    first, second = LLM(smollm2, settings), LLM(smollm2, settings)

    def answers(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        return [list(output.token_ids) for output in llm.generate(prompts, SamplingParams(temperature=0.0), num_tokens)]

    alone = [answers(first, [prompt], 24)[0] for prompt in prompts]
    assert answers(first, prompts, 24) == alone, "in a batch, from the prefix cache"
    for cut in (21, 9):  # another engine computes the beginning of the answer as a prompt
        resumed = [prompt + answer[:cut] for prompt, answer in zip(prompts, alone, strict=True)]
        assert answers(second, resumed, 24 - cut) == [answer[cut:] for answer in alone], f"resumed after {cut} tokens"
