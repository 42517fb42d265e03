"""Whether a GPU in bfloat16 gives the same greedy answers as a CPU in float32, token by token.

    python -m bench run gpu_cpu_agreement MODEL_DIR EXPECTED.json --expect --prompts PROMPTS.jsonl.gz     # on a CPU
    python -m bench run gpu_cpu_agreement MODEL_DIR EXPECTED.json                                         # on a GPU

An answer may leave the CPU's at a near tie: where the CPU's own log-probability of the other token is lower by less than
the largest difference of the two on tokens they have in common. Anything else is a failure.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import BenchmarkError, Needs, Report, Result

if TYPE_CHECKING:
    from stoker.engine.llm import LLMOutput

NAME = "gpu_cpu_agreement"
HELP = "greedy answers in bfloat16 on a GPU against float32 on a CPU, token by token"
NEEDS = Needs(packages=("torch", "numpy", "safetensors"), programs="tokenizers and prompts for --expect; then a GPU")
_MOST_PROMPT_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("expected", type=Path, metavar="EXPECTED.json", help="the CPU's answers")
    parser.add_argument("--expect", action="store_true", help="compute and write the CPU's answers")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="--expect: prompts, such as specbench.jsonl.gz")
    parser.add_argument("--count", type=int, default=50, help="--expect: prompts (default: %(default)s)")
    parser.add_argument("--new", type=int, default=64, help="--expect: output tokens (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    return _expect(args) if args.expect else _compare(args)


def _expect(args: argparse.Namespace) -> Report:
    from tokenizers import Tokenizer

    from stoker.base.config import EngineSettings, SchedSettings
    from stoker.engine.llm import LLM
    from stoker.sched.request import SamplingParams

    if args.prompts is None:
        raise BenchmarkError("--expect needs --prompts FILE")
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    with gzip.open(args.prompts, "rt") as lines:
        texts = [_first_turn(json.loads(line)) for line in lines][: args.count]
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]
    prompts = [tokenizer.encode(chat).ids[-_MOST_PROMPT_TOKENS:] for chat in chats]
    llm = LLM(args.model, EngineSettings(device="cpu", dtype="float32", sched=SchedSettings(max_rows=25)))
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, num_logprobs=10), args.new)
    found = [
        {"prompt": prompt, "answer": answer.token_ids, "tops": _top_logprobs(answer)}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    args.expected.write_text(json.dumps(found))
    return Report()


def _first_turn(line: dict[str, Any]) -> str:
    turns = line.get("turns") or [line["prompt"]]
    return str(turns[0])


def _top_logprobs(answer: LLMOutput) -> list[dict[int, float]]:
    return [dict(zip(one.top_ids, one.top_logprobs, strict=True)) for one in answer.logprobs]


def _compare(args: argparse.Namespace) -> Report:
    from stoker.base.config import EngineSettings, SchedSettings
    from stoker.engine.llm import LLM
    from stoker.sched.request import SamplingParams

    expected = json.loads(args.expected.read_text())
    llm = LLM(args.model, EngineSettings(device=args.device, dtype=args.dtype, sched=SchedSettings(max_rows=64)))
    new = len(expected[0]["answer"])
    answers = llm.generate([one["prompt"] for one in expected], SamplingParams(temperature=0.0, num_logprobs=10), new)
    noise, num_same, num_tokens, partings = 0.0, 0, 0, []
    for number, (one, answer) in enumerate(zip(expected, answers, strict=True)):
        differs = [a != b for a, b in zip(one["answer"], answer.token_ids, strict=True)]
        same = differs.index(True) if True in differs else new
        num_same, num_tokens = num_same + (same == new), num_tokens + same
        tops = _top_logprobs(answer)
        for at in range(same):
            token_id = answer.token_ids[at]
            noise = max(noise, abs(tops[at][token_id] - one["tops"][at][str(token_id)]))
        if same < new:
            theirs, chosen = one["tops"][same], str(answer.token_ids[same])
            behind = theirs[str(one["answer"][same])] - theirs[chosen] if chosen in theirs else float("inf")
            partings.append({"prompt": number, "at": same, "behind": behind})
    wrong = [parting for parting in partings if parting["behind"] > noise]
    case = f"{args.model.name}, {len(expected)} prompts, {new} tokens"
    results = [
        Result(case, "answers equal to the end", "answers", num_same, "higher"),
        Result(case, "answers that leave at a near tie", "answers", len(partings) - len(wrong)),
        Result(case, "answers that leave elsewhere", "answers", len(wrong)),
        Result(case, "largest difference of log-probabilities", "nats", noise),
    ]
    details = {"tokens_in_common": num_tokens, "partings": partings, "beyond_noise": wrong}
    problems = [f"{len(wrong)} answers differ where there is no near tie"] if wrong else []
    return Report(results, details, problems)
