"""SmolLM2 itself: the logits and the greedy text are those of transformers."""

from __future__ import annotations

import gzip
import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from stoker.base.config import EngineSettings, KvSettings
from stoker.engine.llm import LLM
from stoker.layers.quant import dequantise_grouped
from stoker.sched.request import SamplingParams
from stoker.text.template import ChatTemplate
from stoker.text.tokenizer import Tokenizer

NUM_PROMPTS = 100
NEW_TOKENS = 12
SETTINGS = EngineSettings(device="cpu", dtype="float32", cpu_weights="float32", kv=KvSettings(num_blocks=64))
MAX_PERPLEXITY_RATIO = 1.01


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(smollm2)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    stored = load_file(smollm2 / "model.safetensors")
    weights = {
        name: dequantise_grouped(values, stored[f"{name}_scale"], stored[f"{name}_min"])
        if values.dtype == torch.int8
        else values
        for name, values in stored.items()
        if not name.endswith(("_scale", "_min"))
    }
    assert model.load_state_dict(weights, strict=False).missing_keys in ([], ["lm_head.weight"])
    model.tie_weights()
    return model


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
    llm = LLM(smollm2, replace(SETTINGS, kv=KvSettings(num_blocks=2000)))
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

    built = build_engine(smollm2, SETTINGS)
    exact_model = deepcopy(reference).double()
    for token_ids in prompts[::25]:
        with torch.inference_mode():
            exact = exact_model(torch.tensor([token_ids])).logits[0]
            theirs = (reference(torch.tensor([token_ids])).logits[0] - exact).abs().max()
        assert (prompt_logits(built, token_ids, 50) - exact).abs().max() <= 1.5 * theirs <= 3e-4


def test_perplexity_with_8_bit_weights_is_that_of_float32(smollm2: Path, data_dir: Path) -> None:
    """The mean of three texts. On one of 512 tokens, rounding alone can change it by 1%."""
    from test_transformers import prompt_logits

    from stoker.engine.build import build_engine

    tokenizer = Tokenizer.from_folder(smollm2)
    losses = {}
    for weights, grid_heads in (("float32", None), ("int8", 9)):
        built = build_engine(smollm2, replace(SETTINGS, cpu_weights=weights))
        losses[weights] = 0.0
        for name in ("tinyshakespeare.txt.gz", "gpteacher.jsonl.gz", "gsm8k_train.jsonl.gz"):
            with gzip.open(data_dir / "train" / name, "rt") as text:
                token_ids = tokenizer.encode(text.read(4000))[:512]
            logits = prompt_logits(built, token_ids, 256, grid_heads)
            losses[weights] += float(cross_entropy(logits[:-1], torch.tensor(token_ids[1:]))) / 3
    assert math.exp(losses["int8"] - losses["float32"]) <= MAX_PERPLEXITY_RATIO
