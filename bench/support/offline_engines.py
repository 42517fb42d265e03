"""Engines that generate tokens without HTTP: Stoker, vLLM and SGLang behind one contract."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.support.gpu_server import ENVIRONMENT

if TYPE_CHECKING:
    from stoker.engine.llm import LLM

SEED = 0


class OfflineEngine(Protocol):
    """What the workload needs from an engine."""

    vocab_size: int
    max_tokens: int
    facts: dict[str, Any]  # start times and KV memory

    def generate(self, prompts: list[list[int]], num_out: int) -> list[int]:
        """Generate greedily; return the number of output tokens of each prompt."""


class StokerEngine:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        from stoker.base.config import EngineSettings, KvSettings, SchedSettings
        from stoker.engine.llm import LLM

        config = json.loads((folder / "config.json").read_text())
        settings = EngineSettings(
            device=args.device,
            dtype=args.dtype,
            num_threads=args.threads,
            max_model_tokens=min(args.max_model_tokens, config["max_position_embeddings"]),
            kv=KvSettings(memory_gib=args.kv_memory_gib),
            sched=SchedSettings(max_rows=max(512 if not args.small else 0, *args.batches)),
        )
        begin_s = time.time()
        self._llm: LLM = LLM(folder, settings, random_weights_seed=SEED if args.random_weights else None)
        built = self._llm.built
        kv_bytes = built.pool.num_blocks * built.layout.block_bytes
        self.facts = {"init_s": time.time() - begin_s, "kv_gib": kv_bytes / 2**30}
        self.vocab_size, self.max_tokens = built.vocab_size, built.max_model_tokens

    def generate(self, prompts: list[list[int]], num_out: int) -> list[int]:
        from stoker.sched.request import SamplingParams

        done = self._llm.generate(prompts, SamplingParams(temperature=0.0), max_new_tokens=num_out)
        return [len(completion.token_ids) for completion in done]


class VllmEngine:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        import vllm

        begin_s = time.time()
        self._llm = vllm.LLM(
            model=str(folder),
            load_format="dummy" if args.random_weights else "auto",
            dtype=args.dtype or "bfloat16",
            skip_tokenizer_init=True,
            max_model_len=args.max_model_tokens,
            gpu_memory_utilization=0.92,
            enable_prefix_caching=False,
        )
        self._sampling: Callable[..., Any] = vllm.SamplingParams
        config = json.loads((folder / "config.json").read_text())
        cache = self._llm.llm_engine.vllm_config.cache_config
        self.facts = {"init_s": time.time() - begin_s, "version": vllm.__version__}
        self.facts["kv_gib"] = cache.num_gpu_blocks * cache.block_size * _kv_bytes_per_token(config) / 2**30
        self.vocab_size, self.max_tokens = config["vocab_size"], args.max_model_tokens

    def generate(self, prompts: list[list[int]], num_out: int) -> list[int]:
        sampling = self._sampling(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        done = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in done]


def _kv_bytes_per_token(config: dict[str, Any]) -> int:
    """Return the bytes of one token's KV in 16 bits. With latent attention, a layer keeps one latent and one rotated key."""
    if config.get("kv_lora_rank"):
        width = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
    else:
        width = 2 * int(config["num_key_value_heads"]) * int(config["head_dim"])
    return 2 * int(config["num_hidden_layers"]) * width


class SglangEngine:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        import sglang
        from sglang.srt.entrypoints.engine import Engine

        begin_s = time.time()
        self._engine = Engine(
            model_path=str(folder),
            load_format="dummy" if args.random_weights else "auto",
            dtype=args.dtype or "bfloat16",
            skip_tokenizer_init=True,
            context_length=args.max_model_tokens,
            disable_radix_cache=True,
            log_level="warning",
        )
        config = json.loads((folder / "config.json").read_text())
        self.facts = {"init_s": time.time() - begin_s, "version": sglang.__version__}
        self.vocab_size, self.max_tokens = config["vocab_size"], args.max_model_tokens

    def generate(self, prompts: list[list[int]], num_out: int) -> list[int]:
        sampling = {"temperature": 0.0, "max_new_tokens": num_out, "ignore_eos": True}
        done = self._engine.generate(input_ids=prompts, sampling_params=sampling)
        return [int(answer["meta_info"]["completion_tokens"]) for answer in done]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine that can be measured."""

    title: str
    module: str  # importing it takes most of the time before the engine is built
    build: Callable[[argparse.Namespace, Path], OfflineEngine]
    environment: Mapping[str, str] = field(default_factory=dict)


ENGINES = {
    "stoker": EngineKind("Stoker", "stoker.engine.llm", StokerEngine),
    "vllm": EngineKind("vLLM", "vllm.entrypoints.llm", VllmEngine, ENVIRONMENT["vllm"]),
    "sglang": EngineKind("SGLang", "sglang.srt.entrypoints.engine", SglangEngine, {"HF_HUB_OFFLINE": "1"}),
}
