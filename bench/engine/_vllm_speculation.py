"""The measuring part of `oracle_speculation`, for vLLM with synthetic acceptance. Imports vLLM: import this module inside `run`."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.support.decode_window import measure_window
from bench.support.offline_engines import SEED

_WARM_TOKENS = 24


def speculative_config(head: Path, num_drafts: int, acceptance: float) -> dict[str, Any]:
    """Return vLLM's configuration. The rates are those of all drafts up to a position being right."""
    return {
        "method": "eagle3",
        "model": str(head),
        "num_speculative_tokens": num_drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [acceptance**position for position in range(1, num_drafts + 1)],
    }


def _keep_own_heads() -> None:
    """Let heads with dummy weights keep their own output matrix.

    vLLM notes while it loads the weights whether a head has one. Dummy weights are not loaded, so it would take the target
    model's, which has the whole vocabulary. It starts the engine's process by fork, which keeps this change.
    """
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    Eagle3LlamaForCausalLM.has_own_lm_head = True


def measure_vllm(args: Any, folder: Path, head: Path | None, num_drafts: int, vocab_size: int) -> dict[str, Any]:
    """Measure one number of drafts at all batch sizes. `head` is the folder of the head, None without drafts."""
    import vllm

    begin_s = time.time()
    options: dict[str, Any] = {}
    if head is not None:
        options["speculative_config"] = speculative_config(head, num_drafts, args.acceptance)
        if args.head_vocab < vocab_size:
            _keep_own_heads()
    llm = vllm.LLM(
        model=str(folder),
        load_format="dummy" if args.random_weights else "auto",
        dtype=args.dtype or "bfloat16",
        skip_tokenizer_init=True,
        max_model_len=args.max_model_tokens,
        gpu_memory_utilization=0.92,
        enable_prefix_caching=False,
        **options,
    )
    init_s = time.time() - begin_s
    rng = random.Random(SEED)
    prompts = [
        [rng.randrange(10, min(48_000, vocab_size)) for _ in range(args.prompt_tokens)]
        for _ in range(max(args.batches))
    ]
    found = []
    for batch in args.batches:
        for _ in _steps(llm, prompts[:batch], _WARM_TOKENS):
            pass
        for _ in range(2):
            window = measure_window(
                _steps(llm, prompts[:batch], args.decode_tokens), batch, args.decode_tokens, lambda: None
            )
            run = {
                "batch": batch,
                "drafts": str(num_drafts) if num_drafts else "off",
                "tokens_per_s": window.tokens / window.seconds,
            }
            print(run, flush=True)
            found.append(run)
    return {"version": vllm.__version__, "init_s": init_s, "runs": found}


def _steps(llm: Any, prompts: list[list[int]], num_out: int) -> Iterator[dict[int, int]]:
    """Answer the prompts. Yield the new tokens of each step by sequence."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=num_out,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        yield {int(answer.request_id): len(answer.outputs[0].token_ids) for answer in engine.step()}
