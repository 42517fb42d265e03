"""An engine of test_one_gpu_ranks_cuda.py, in a process of its own. Its ranks share one GPU.

python one_gpu_engine.py answers FOLDER DEVICE TP EP PLAIN OUT    # writes token ids as JSON
python one_gpu_engine.py timing TP NEW_TOKENS                     # prints the time of a decode step
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(1, str(Path(__file__).parent))

import no_pytest  # noqa: F401 - before what is a test too
from test_engine_cuda import answers

from stoker.base.config import EngineSettings, KvSettings, RankSettings, SchedSettings
from stoker.engine.llm import LLM
from stoker.sched.request import SamplingParams

# Llama 3.1 8B with 4 layers.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def write_answers(folder: str, device: str, tp: str, ep: str, plain: str, out: str) -> None:
    if device == "cpu":
        found = answers(Path(folder), device, 0, 2000, 512, "float32", plain == "plain")
    else:
        ranks = RankSettings(tp=int(tp), ep=int(ep), per_gpu=int(tp))
        num_blocks, step_tokens = (2000, 64) if plain == "plain" else (60, 512)
        found = answers(Path(folder), device, 1, num_blocks, step_tokens, "float32", plain == "plain", ranks)
    Path(out).write_text(json.dumps(found))


def time_decoding(tp: str, new_tokens: str) -> None:
    count = int(new_tokens)
    settings = EngineSettings(
        device="cuda",
        dtype="bfloat16",
        spare_engine="off",
        kv=KvSettings(num_blocks=256),
        sched=SchedSettings(step_tokens=256, max_rows=8),
        ranks=RankSettings(tp=int(tp), per_gpu=int(tp)),
    )
    with tempfile.TemporaryDirectory() as path:
        Path(path, "config.json").write_text(json.dumps(LLAMA))
        started_s = time.monotonic()
        with closing(LLM(path, settings, random_weights_seed=1)) as llm:
            print(f"  tp {tp}: started in {time.monotonic() - started_s:.1f} s", flush=True)
            for batch in (1, 8):
                prompts = [[10 + number] * 20 for number in range(batch)]
                llm.generate(prompts, SamplingParams(temperature=0.0), 4)
                elapsed = []
                for num_tokens in (count, 3 * count):
                    started_s = time.monotonic()
                    outputs = llm.generate(prompts, SamplingParams(temperature=0.0), num_tokens)
                    elapsed.append(time.monotonic() - started_s)
                    assert all(len(output.token_ids) == num_tokens for output in outputs)
                step_ms = (elapsed[1] - elapsed[0]) / (2 * count) * 1e3
                print(f"  tp {tp}, batch {batch}: {step_ms:.3f} ms per decode step", flush=True)


if __name__ == "__main__":
    {"answers": write_answers, "timing": time_decoding}[sys.argv[1]](*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # ranks that were killed may have taken the CUDA context of this process with them
