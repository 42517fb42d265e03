"""The measuring part of `memory_fuzz`."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.contract import Report, Result
from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.ids import RequestId
from stoker.engine.llm import LLM
from stoker.engine.model_identity import read_hf_config
from stoker.kernels.sample import penalise
from stoker.models.family import family_of
from stoker.models.weights import parameter_slices
from stoker.sched.request import GenerateRequest, SamplingParams, TokenChunk

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
_OPEN_REQUESTS = 700  # more than rows, so that some always wait
_NEAR_TIE = 0.08  # difference of two logits in bf16 arithmetic


@dataclass(slots=True)
class FuzzAnswer:
    request: GenerateRequest
    cancel_at: int | None  # cancel after this many tokens
    token_ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    finish: str | None = None


class RequestFuzzer:
    def __init__(self, llm: LLM, seed: int) -> None:
        self._llm = llm
        self._engine = llm.built.engine
        self._rng = random.Random(seed)
        self._shared = [self._tokens(2000) for _ in range(8)]
        self.answers: dict[RequestId, FuzzAnswer] = {}
        self.fullest = 0.0
        self.problems: list[str] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(SHAPE["vocab_size"]) for _ in range(count)]

    def request(self, number: int) -> FuzzAnswer:
        rng = self._rng
        prompt = self._tokens(rng.choice([1, 2, 63, 64, 65, rng.randrange(1, 400), rng.randrange(1, 3000)]))
        if rng.random() < 0.3:
            prompt = rng.choice(self._shared)[: rng.randrange(1, 2000)] + prompt[:100]
        new = rng.choice([1, 2, rng.randrange(1, 64), rng.randrange(1, 300)])
        sampling = SamplingParams(temperature=0.0)
        if rng.random() < 0.7:
            sampling = SamplingParams(
                temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
                top_p=rng.choice([1.0, 1.0, 0.9, 0.1]),
                top_k=rng.choice([0, 0, 1, 40]),
                min_p=rng.choice([0.0, 0.0, 0.05]),
                seed=rng.randrange(1 << 40),
                num_logprobs=rng.choice([None] * 6 + [0, 5]),
                frequency_penalty=rng.choice([0.0] * 6 + [0.5]),
                repetition_penalty=rng.choice([1.0] * 6 + [1.2]),
                logit_bias={}
                if rng.random() < 0.9
                else {rng.randrange(SHAPE["vocab_size"]): rng.uniform(-5, 5) for _ in range(3)},
                stop_token_ids=tuple(self._tokens(rng.choice([0, 0, 1, 500]))),
                min_tokens=rng.choice([0, 0, 0, min(4, new)]),
            )
        request = GenerateRequest(
            RequestId(f"fuzz-{number}"), prompt, len(prompt), sampling, new, priority=rng.choice([0, 0, 0, 1])
        )
        return FuzzAnswer(request, rng.randrange(new + 1) if rng.random() < 0.1 else None)

    def run(self, num_requests: int, most_s: float) -> int:
        begun, number, open_ids, pool = time.monotonic(), 0, set[RequestId](), self._llm.built.pool
        while True:
            while number < num_requests and len(open_ids) < _OPEN_REQUESTS and time.monotonic() - begun < most_s:
                answer = self.request(number)
                self.answers[answer.request.request_id] = answer
                open_ids.add(answer.request.request_id)
                self._engine.add(answer.request)
                number += 1
            if not self._engine.has_work:
                return number
            for chunk in self._engine.step():
                self._take(chunk, open_ids)
            self.fullest = max(self.fullest, 1 - pool.num_free / pool.num_blocks)

    def _take(self, chunk: TokenChunk, open_ids: set[RequestId]) -> None:
        answer = self.answers[chunk.request_id]
        answer.token_ids += chunk.token_ids
        answer.num_logprobs += len(chunk.logprobs or [])
        if chunk.finish is not None:
            answer.finish = chunk.finish.reason
            open_ids.discard(chunk.request_id)
            self._judge(answer)
        elif answer.cancel_at is not None and len(answer.token_ids) >= answer.cancel_at:
            self._engine.cancel(chunk.request_id)

    def _judge(self, answer: FuzzAnswer) -> None:
        request, sampling, count = answer.request, answer.request.sampling, len(answer.token_ids)
        stopped = count and answer.token_ids[-1] in sampling.stop_token_ids
        right = {
            "length": count == request.max_new_tokens,
            "stop": bool(stopped) and count >= sampling.min_tokens,
            "cancelled": answer.cancel_at is not None,
        }.get(answer.finish or "", False)
        if sampling.num_logprobs is not None and answer.num_logprobs != count:
            right = False
        if not all(0 <= token_id < SHAPE["vocab_size"] for token_id in answer.token_ids):
            right = False
        if not right:
            self.problems.append(
                f"{request.request_id}: {answer.finish} after {count} of {request.max_new_tokens}: {sampling}"
            )

    def check(self, folder: Path, most: int) -> dict[str, Any]:
        """Compare greedy answers, with and without penalties and biases, with transformers' model in float32."""
        import transformers

        library: Any = transformers  # its annotations are partial
        model = library.LlamaForCausalLM(library.LlamaConfig(**SHAPE, attn_implementation="eager"))
        family = family_of(read_hf_config(folder), str(folder))
        weights = {name: value.float() for name, value in parameter_slices(self._llm.built.model, family.rules)}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"lm_head.weight"}, missing
        device = "cuda"
        model = model.to(device).eval()
        greedy = [
            answer for answer in self.answers.values() if answer.request.sampling.temperature == 0 and answer.token_ids
        ]
        worst, wrong, num_tokens = 0.0, list[str](), 0
        greedy = greedy[:: max(1, len(greedy) // most)]
        for answer in greedy:
            prompt = answer.request.token_ids
            with torch.inference_mode():
                token_ids = torch.tensor([prompt + answer.token_ids[:-1]], device=device)
                logits = model(token_ids).logits[0, len(prompt) - 1 :].clone()
            logits = shaped(logits, answer)
            gaps = logits.amax(-1) - logits.gather(1, torch.tensor(answer.token_ids, device=device)[:, None])[:, 0]
            worst, num_tokens = max(worst, float(gaps.max())), num_tokens + len(gaps)
            if float(gaps.max()) > _NEAR_TIE:
                wrong.append(f"{answer.request.request_id}: prompt of {len(prompt)}, off by {float(gaps.max()):.2f}")
        return {"answers": len(greedy), "tokens": num_tokens, "worst_gap": worst, "wrong": wrong}


def shaped(logits: torch.Tensor, answer: FuzzAnswer) -> torch.Tensor:
    """Apply penalties and biases to logits [answer tokens, vocab], and mask stop tokens before min_tokens."""
    sampling, vocab, device = answer.request.sampling, logits.shape[1], logits.device
    sampled = torch.nn.functional.one_hot(torch.tensor(answer.token_ids, device=device), vocab)
    in_prompt = torch.tensor(answer.request.token_ids, device=device).bincount(minlength=vocab) > 0
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    each = (torch.full(logits.shape[:1], penalty, device=device) for penalty in penalties)
    logits = penalise(logits, sampled.cumsum(0) - sampled, in_prompt[None], *each)
    for token_id, bias in sampling.logit_bias.items():
        logits[:, token_id] += bias
    logits[: sampling.min_tokens, list(sampling.stop_token_ids)] = float("-inf")
    return logits


def measure(args: argparse.Namespace) -> Report:
    on_gpu = torch.cuda.is_available()
    ballast = None
    if on_gpu:
        free, _total = torch.cuda.mem_get_info()
        ballast = torch.empty(max(0, int(free - args.left_gib * 2**30)), dtype=torch.uint8, device="cuda")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        kv = KvSettings(memory_gib=args.kv_gib) if on_gpu else KvSettings(16, 400)
        settings = EngineSettings(kv=kv, sched=SchedSettings(args.step_tokens, args.rows))
        llm = LLM(folder, settings, random_weights_seed=args.seed)
        fuzz = RequestFuzzer(llm, args.seed)
        begin_s = time.monotonic()
        num_requests = fuzz.run(args.requests, args.seconds)
        pool = llm.built.pool
        pool.check()
        found: dict[str, Any] = {
            "requests": num_requests,
            "seconds": time.monotonic() - begin_s,
            "tokens": sum(len(answer.token_ids) for answer in fuzz.answers.values()),
            "kv_tokens": pool.num_blocks * llm.built.layout.block_tokens,
            "fullest": fuzz.fullest,
            "preemptions": llm.built.scheduler.counters.preemptions,
            "finishes": Counter(answer.finish for answer in fuzz.answers.values()),
            "blocks_lost": pool.num_blocks - pool.num_free,
            "problems": fuzz.problems[:20],
            "num_problems": len(fuzz.problems),
        }
        print(json.dumps(found), flush=True)
        if on_gpu:
            stats = torch.cuda.memory_stats()
            free, _total = torch.cuda.mem_get_info()
            found |= {"free_mib": free >> 20, "retries": stats["num_alloc_retries"], "ooms": stats["num_ooms"]}
            for line in llm.built.memory:
                planned, used = line.planned_bytes >> 20, line.used_bytes >> 20
                print(f"{line.name:24} {planned:8} MiB planned {used:8} used", flush=True)
            del ballast
            found["checked"] = fuzz.check(folder, args.checked)
    return _report(found)


def _report(found: dict[str, Any]) -> Report:
    case = f"{found['requests']:,} random requests, {found['kv_tokens']:,} tokens of KV"
    wrong = found.get("checked", {}).get("wrong", [])
    results = [
        Result(case, "requests that ended wrongly", "requests", found["num_problems"]),
        Result(case, "KV blocks lost", "blocks", found["blocks_lost"]),
        Result(case, "fullest KV pool", "%", 100 * found["fullest"], "higher"),
        Result(case, "preemptions", "times", found["preemptions"]),
    ]
    if "checked" in found:
        checked = found["checked"]
        notes = f"{checked['tokens']:,} tokens of {checked['answers']} greedy answers compared with transformers"
        results += [
            Result(case, "memory allocations retried or failed", "times", found["retries"] + found["ooms"]),
            Result(case, "wrong answers", "answers", len(wrong), notes=notes),
        ]
    problems = [f"{found['num_problems']} requests ended wrongly"] if found["num_problems"] else []
    problems += [f"{found['blocks_lost']} blocks are lost"] if found["blocks_lost"] else []
    problems += [f"{len(wrong)} answers are wrong"] if wrong else []
    return Report(results, found, problems)
