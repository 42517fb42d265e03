"""SmolLM2 itself: the logits and the greedy text are those of transformers."""

from __future__ import annotations

import gzip
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stoker.base.config import EngineSettings, KvSettings
from stoker.engine.llm import LLM
from stoker.sched.request import SamplingParams
from stoker.text.template import ChatTemplate
from stoker.text.tokenizer import Tokenizer

NUM_PROMPTS = 100
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(smollm2: Path, data_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(smollm2)
    template = ChatTemplate.from_folder(smollm2, tokenizer)
    found = []
    for name in ("arena", "gsm8k", "humaneval", "mtbench", "specbench"):
        with gzip.open(data_dir / "prompts" / f"{name}.jsonl.gz", "rt") as lines:
            texts = [json.loads(line)["turns"][0] for line in lines]
        rendered = [tokenizer.encode(template.render([{"role": "user", "content": text}])) for text in texts]
        found += sorted(rendered, key=len)[: NUM_PROMPTS // 5]  # the shortest, to keep the test fast
    assert len(found) == NUM_PROMPTS
    return found


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_greedy_text_is_that_of_transformers(
    smollm2: Path, reference: Any, prompts: list[list[int]], every: int
) -> None:
    """Token by token: after the prompt and our tokens so far, transformers' most likely token is our next one."""
    prompts = prompts[::every]
    llm = LLM(smollm2, EngineSettings(device="cpu", dtype="float32", kv=KvSettings(num_blocks=2000)))
    completions = llm.generate(
        prompts, SamplingParams(temperature=0.0, num_logprobs=0, stop_token_ids=(2,)), NEW_TOKENS
    )
    worst = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == completion.token_ids
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
        ours = torch.tensor([token.logprob for token in completion.logprobs])
        worst = max(worst, float((logprobs - ours).abs().max()))
    assert worst <= 2e-4  # transformers itself is 1e-4 from float64


def test_logits_are_as_close_to_float64_as_those_of_transformers(
    smollm2: Path, reference: Any, prompts: list[list[int]]
) -> None:
    """Both round differently: they may differ by 1e-4 where each is that far from float64."""
    from test_transformers import prompt_logits

    from stoker.engine.build import build_engine

    built = build_engine(smollm2, EngineSettings(device="cpu", dtype="float32", kv=KvSettings(num_blocks=64)))
    exact_model = deepcopy(reference).double()
    for token_ids in prompts[::25]:
        with torch.inference_mode():
            exact = exact_model(torch.tensor([token_ids])).logits[0]
            theirs = (reference(torch.tensor([token_ids])).logits[0] - exact).abs().max()
        assert (prompt_logits(built, token_ids, 50) - exact).abs().max() <= 1.5 * theirs <= 3e-4
