"""A draft model on the device: its drafts are those of the plain reference, and no answer changes with it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from models.eagle3_files import FORMATS, LAYERS, VOCAB, Format, PlainHead, make_tensors, write_head
from test_handoff_engine import NEW_TOKENS, hand_over
from test_schedules import random_request
from tiny import make_tiny
from torch import Tensor

from stoker.base.config import EngineSettings, HandoffSettings, KvSettings, SchedSettings, StoreSettings
from stoker.base.errors import ModelFilesError
from stoker.base.ids import RequestId, Row
from stoker.engine.llm import LLM, LLMOutput
from stoker.kernels.row_tokens import LENGTH, MODEL, MODEL_START, NO_GUESS
from stoker.kernels.sample import noise_keys, sample_tokens
from stoker.sched.draft_tape import MODEL_GUESSES
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.train.evaluate import EveryDraft

FORM = FORMATS["specforge 3.1"]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("target")
    return folder, make_tiny(folder, "llama", torch.float64, num_hidden_layers=LAYERS)


def settings(drafter: str, **changes: Any) -> EngineSettings:
    return EngineSettings(
        dtype="float64", device="cpu", num_threads=1, drafter=drafter, numerics="exact",
        **{"kv": KvSettings(16, 64), "sched": SchedSettings(step_tokens=24, max_rows=4)} | changes,
    )  # fmt: skip


def hidden_states(reference: Any, token_ids: list[int], form: Format) -> dict[int, Tensor]:
    with torch.no_grad():
        found = reference(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return {layer: found[layer][0] for layer in form.taps}


@pytest.fixture(scope="module")
def trained(target: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that has learnt what the target model writes after a few prompts, so that drafts are accepted."""
    folder, reference = target
    with closing(LLM(folder, settings("off"))) as llm:
        answers = llm.generate(PROMPTS, GREEDY, 40)
    texts = [prompt + answer.token_ids for prompt, answer in zip(PROMPTS, answers, strict=True)]
    tensors = {
        name: tensor.clone().requires_grad_(tensor.is_floating_point()) for name, tensor in make_tensors(FORM).items()
    }
    # Every token that occurs can be drafted.
    used = sorted({token for text in texts for token in text})
    ids = (
        torch.tensor((used + [token for token in range(VOCAB) if token not in used])[: len(tensors["d2t"])])
        .sort()
        .values
    )
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    plain = PlainHead(FORM, tensors, reference.model.embed_tokens.weight, reference.lm_head.weight)
    hidden = [hidden_states(reference, text[:-1], FORM) for text in texts]
    optimizer = torch.optim.Adam([tensor for tensor in tensors.values() if tensor.requires_grad], 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        for text, states in zip(texts, hidden, strict=True):
            out = plain.hidden(torch.tensor(text[1:]), plain.features(states))
            logits = plain.logits(out)[:-1, plain.target_ids]
            wanted = torch.searchsorted(plain.target_ids, torch.tensor(text[2:])).clamp(max=len(ids) - 1)
            is_known = plain.target_ids[wanted] == torch.tensor(text[2:])
            torch.nn.functional.cross_entropy(logits[is_known], wanted[is_known]).backward()
        optimizer.step()
    made = tmp_path_factory.mktemp("head")
    write_head(made, FORM, {name: tensor.detach() for name, tensor in tensors.items()})
    return made


PROMPTS = [[3, 14, 15, 92, 65], [35, 89, 79, 32, 38, 46, 26, 43], list(range(100, 130))]


def tokens(outputs: list[LLMOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", ["speculators", "eagle", "vllm, MLA"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_in_the_row_table_are_those_of_the_reference(
    name: str, temperature: float, target: tuple[Path, Any], tmp_path: Path
) -> None:
    form = FORMATS[name]
    tensors = make_tensors(form)
    write_head(tmp_path, form, tensors)
    folder, reference = target
    plain = PlainHead(form, tensors, reference.model.embed_tokens.weight, reference.lm_head.weight)
    sampling = SamplingParams(temperature=temperature, seed=11)

    def pick(logits: Tensor, position: int) -> int:
        if not temperature:
            return int(logits.argmax())
        key = noise_keys(torch.tensor([11]), torch.tensor([position]))
        kept = (torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.0]))
        return int(sample_tokens(logits[None], torch.tensor([temperature]), *kept, key))

    prompt = PROMPTS[2]
    drafting = settings(f"eagle3:{tmp_path}", kv=KvSettings(16, 64))
    with closing(LLM(folder, drafting, wrap_drafting=EveryDraft)) as llm:
        engine, rows = llm.built.engine, llm.built.engine._runner._rows
        known, num_compared = list(prompt), 0
        engine.add(GenerateRequest(RequestId("r"), prompt, len(prompt), sampling, 12))
        while engine.has_work:
            known += [token for chunk in engine.step() for token in chunk.token_ids]
            table = rows.tokens[Row(0)]
            if len(known) == len(prompt) or table[LENGTH] != len(known):
                continue
            features = plain.features(hidden_states(reference, known[:-1], form))
            expected, _ = plain.draft(known, features, MODEL_GUESSES, pick)
            assert table[MODEL_START] == len(known)
            found = table[MODEL : MODEL + MODEL_GUESSES].tolist()
            room = int(rows.blocks[0][0, -1]) * 16
            for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                if number and len(known) + number - 2 >= room:
                    assert ours == NO_GUESS, "the row has no block for this draft's KV"
                else:
                    assert ours == theirs, f"draft {number} after {len(known)} tokens"
                num_compared += 1
    assert num_compared > 20


def test_answers_are_the_same_and_drafts_are_accepted(target: tuple[Path, Any], trained: Path) -> None:
    folder, _ = target
    with closing(LLM(folder, settings("off"))) as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY, 40))
    with closing(LLM(folder, settings(f"eagle3:{trained}"), wrap_drafting=EveryDraft)) as llm:
        steps = llm.built.engine.num_steps
        assert tokens(llm.generate(PROMPTS, GREEDY, 40)) == expected
        counters, pool = llm.built.scheduler.counters, llm.built.pool
        assert counters.accepted_draft_tokens > 0.3 * counters.generated_tokens
        assert counters.accepted_draft_tokens == llm.built.draft_counts.by_source["eagle3"].num_accepted
        assert llm.built.engine.num_steps - steps < 80
        assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_gives_the_same_answers(seed: int, target: tuple[Path, Any], trained: Path) -> None:
    """Chunked prompts, preemption, prefix hits, penalties, logprobs and salts, with tapes beside the draft model."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    requests = [random_request(rng, number, shared) for number in range(8)]
    folder, _ = target
    with closing(LLM(folder, settings("off"))) as llm:
        expected = [(output.token_ids, output.finish) for output in llm.run(requests)]
    kv = KvSettings(4, rng.choice([20, 60]))
    sched = SchedSettings(step_tokens=rng.choice([5, 24]), max_rows=rng.choice([2, 5]))
    drafter = rng.choice(["eagle3", "ngram,eagle3"])
    drafting = settings(f"{drafter}:{trained}", kv=kv, sched=sched, steps_ahead=seed % 2)
    with closing(LLM(folder, drafting, wrap_drafting=EveryDraft)) as llm:
        found = [(output.token_ids, output.finish) for output in llm.run(requests)]
        assert found == expected
        assert llm.built.scheduler.counters.draft_tokens
        assert llm.built.pool.num_free == llm.built.pool.num_blocks


def test_loaded_blocks_start_without_draft_kv(target: tuple[Path, Any], trained: Path, tmp_path: Path) -> None:
    """Tiers carry the model's KV only. What an earlier owner left of the draft model's KV is cleared."""
    folder, _ = target
    store = StoreSettings(host_gib=0.01)
    with closing(LLM(folder, settings("off"))) as llm:
        expected = tokens(llm.generate([PROMPTS[2]], GREEDY, 20))
    with closing(LLM(folder, settings(f"eagle3:{trained}", kv=KvSettings(8, 8), store=store))) as llm:
        first = llm.generate([PROMPTS[2]], GREEDY, 20)
        for other in range(4):  # the pool forgets the prompt, the tier does not
            llm.generate([[other] * 30], GREEDY, 20)
        again = llm.generate([PROMPTS[2]], GREEDY, 20)
        assert tokens(first) == tokens(again) == expected
        assert llm.built.scheduler.counters.loaded_tokens


def test_a_sequence_that_is_handed_over_has_the_same_answer(target: tuple[Path, Any], trained: Path) -> None:
    """The worker that decodes gets no draft KV of the prompt. It drafts worse, and answers the same."""
    folder, _ = target
    prompts = [PROMPTS[2], [*PROMPTS[1], *PROMPTS[0]]]
    with closing(LLM(folder, settings("off"))) as llm:
        expected = tokens(llm.generate(prompts, GREEDY, NEW_TOKENS))
    handoff = HandoffSettings(serves=True, transports=("local", "tcp"))
    drafter = f"eagle3:{trained}"
    with (
        closing(LLM(folder, settings(drafter, handoff=handoff))) as prefill,
        closing(LLM(folder, settings(drafter), wrap_drafting=EveryDraft)) as decode,
    ):
        assert tokens(hand_over(prefill, decode, prompts)) == expected
        assert decode.built.scheduler.counters.pulled_tokens
        assert decode.built.scheduler.counters.draft_tokens


def test_a_head_for_another_model_is_refused_at_the_start(target: tuple[Path, Any], tmp_path: Path) -> None:
    write_head(tmp_path, FORM, make_tensors(FORM), {"vocab_size": 300})
    with pytest.raises(ModelFilesError, match=f"draft head {tmp_path}: .*vocab_size is 300"):
        LLM(target[0], settings(f"eagle3:{tmp_path}"))


def test_a_head_of_not_a_numbers_costs_time_only(target: tuple[Path, Any], tmp_path: Path) -> None:
    nothing: Mapping[str, Tensor] = {
        name: tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor
        for name, tensor in make_tensors(FORM).items()
    }
    write_head(tmp_path, FORM, nothing)
    folder, _ = target
    with closing(LLM(folder, settings("off"))) as llm:
        expected = tokens(llm.generate(PROMPTS, SamplingParams(seed=5), 12))
    with closing(LLM(folder, settings(f"eagle3:{tmp_path}"))) as llm:
        assert tokens(llm.generate(PROMPTS, SamplingParams(seed=5), 12)) == expected
