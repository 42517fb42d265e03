"""Does a card say what the CPU says? Greedy answers in bfloat16 on a card against those in float32 on a CPU, token for token.

    python bench/gpu_same.py expect MODEL_DIR EXPECTED.json --prompts PROMPTS.jsonl.gz [--count 50] [--new 64]     # on a CPU
    python bench/gpu_same.py compare MODEL_DIR EXPECTED.json OUT.json                                              # on a card

An answer may leave the CPU's at a near tie: where the CPU itself has the other token behind its own by less than the two
differ anyway, which is measured on all tokens before.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from stoker.base.config import EngineSettings, SchedSettings  # noqa: E402
from stoker.engine.llm import LLM, LLMOutput  # noqa: E402
from stoker.sched.request import SamplingParams  # noqa: E402

GREEDY = SamplingParams(temperature=0.0, num_logprobs=10)


def expect(args: argparse.Namespace) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    with gzip.open(args.prompts, "rt") as lines:
        texts = [_text(json.loads(line)) for line in lines][: args.count]
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids[-512:] for text in texts
    ]
    llm = LLM(args.model, EngineSettings(device="cpu", dtype="float32", sched=SchedSettings(max_rows=25)))
    answers = llm.generate(prompts, GREEDY, args.new)
    found = [
        {"prompt": prompt, "answer": answer.token_ids, "tops": _tops(answer)}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    args.expected.write_text(json.dumps(found))


def _text(line: dict[str, Any]) -> str:
    turns = line.get("turns") or [line["prompt"]]
    return str(turns[0])


def _tops(answer: LLMOutput) -> list[dict[int, float]]:
    return [dict(zip(one.top_ids, one.top_logprobs, strict=True)) for one in answer.logprobs]


def compare(args: argparse.Namespace) -> None:
    expected = json.loads(args.expected.read_text())
    llm = LLM(args.model, EngineSettings(device=args.device, dtype=args.dtype, sched=SchedSettings(max_rows=64)))
    new = len(expected[0]["answer"])
    answers = llm.generate([one["prompt"] for one in expected], GREEDY, new)
    noise, num_same, num_tokens, partings = 0.0, 0, 0, []
    for number, (one, answer) in enumerate(zip(expected, answers, strict=True)):
        differs = [a != b for a, b in zip(one["answer"], answer.token_ids, strict=True)]
        same = differs.index(True) if True in differs else new
        num_same, num_tokens = num_same + (same == new), num_tokens + same
        ours = _tops(answer)
        for at in range(same):
            token_id = answer.token_ids[at]
            noise = max(noise, abs(ours[at][token_id] - one["tops"][at][str(token_id)]))
        if same < new:
            tops, said = one["tops"][same], str(answer.token_ids[same])
            behind = tops[str(one["answer"][same])] - tops[said] if said in tops else float("inf")
            partings.append({"prompt": number, "at": same, "behind": behind})
    wrong = [parting for parting in partings if parting["behind"] > noise]
    results = {
        "prompts": len(expected),
        "same_to_the_end": num_same,
        "tokens_in_common": num_tokens,
        "most_noise": noise,
        "partings": partings,
        "beyond_noise": wrong,
    }
    print({name: value for name, value in results.items() if name != "partings"}, flush=True)
    print("behind at the partings:", sorted(round(parting["behind"], 3) for parting in partings), flush=True)
    args.out.write_text(json.dumps(results, indent=1))
    if wrong:
        raise SystemExit(f"{len(wrong)} answers part where there is no near tie")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("expect")
    one.add_argument("model", type=Path)
    one.add_argument("expected", type=Path)
    one.add_argument("--prompts", type=Path, required=True)
    one.add_argument("--count", type=int, default=50)
    one.add_argument("--new", type=int, default=64)
    one.set_defaults(run=expect)
    other = commands.add_parser("compare")
    other.add_argument("model", type=Path)
    other.add_argument("expected", type=Path)
    other.add_argument("out", type=Path)
    other.add_argument("--device", default="cuda")
    other.add_argument("--dtype", default="bfloat16")
    other.set_defaults(run=compare)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
