"""An EAGLE-3 head on a CUDA device: answers do not change, and its guesses are those that a CPU makes. Runs under pytest
(-m gpu), or as a script without pytest."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

from safetensors.torch import save_file

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.engine.llm import LLM
from stoker.kernels.row_tokens import LENGTH, MODEL, NEXT
from stoker.sched.request import SamplingParams
from stoker.train.evaluate import EveryDraft
from tests.gpu.test_engine_cuda import CONFIG, DEVICE, make_folder

HIDDEN, HEADS, KV_HEADS, DIM, MLP, VOCAB, DRAFT_VOCAB = 128, 4, 4, 32, 160, 997, 300


def make_head(path: Path) -> Path:
    """Write a random head whose layer has another shape than the model's."""
    config = {
        **CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "intermediate_size": MLP,
        "draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [1, 2], "norm_output": True,
    }  # fmt: skip
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    layer = "midlayer."
    shapes = {
        "fc.weight": (HIDDEN, 2 * HIDDEN), "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        f"{layer}self_attn.q_proj.weight": (HEADS * DIM, 2 * HIDDEN),
        f"{layer}self_attn.k_proj.weight": (KV_HEADS * DIM, 2 * HIDDEN),
        f"{layer}self_attn.v_proj.weight": (KV_HEADS * DIM, 2 * HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM), f"{layer}mlp.gate_proj.weight": (MLP, HIDDEN),
        f"{layer}mlp.up_proj.weight": (MLP, HIDDEN), f"{layer}mlp.down_proj.weight": (HIDDEN, MLP),
    }  # fmt: skip
    tensors = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    for name in ("norm", f"{layer}hidden_norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(HIDDEN)
    tensors["d2t"] = 3 * torch.arange(DRAFT_VOCAB) - torch.arange(DRAFT_VOCAB)
    save_file(tensors, path / "model.safetensors")
    return path


def run(
    folder: Path, device: str, dtype: str, drafter: str, numerics: str, steps_ahead: int, temperature: float
) -> tuple[list[list[int]], dict[tuple[int, int], list[int]]]:
    """Return the answers, and the guesses after every step, by the lengths of the prompt and of the sequence."""
    settings = EngineSettings(
        device=device, dtype=dtype, numerics=numerics, steps_ahead=steps_ahead, num_threads=2, drafter=drafter,
        kv=KvSettings(block_tokens=16, num_blocks=400), sched=SchedSettings(step_tokens=64, max_rows=16),
    )  # fmt: skip
    prompts = [[(7 * number + 13 * at) % VOCAB for at in range(1 + 9 * number)] for number in range(12)]
    sampling = [SamplingParams(temperature=temperature, seed=number) for number in range(12)]
    # Which drafts the controller verifies depends on measured times.
    llm = LLM(folder, settings, wrap_drafting=lambda drafting: drafting if drafter == "off" else EveryDraft(drafting))
    runner, guesses = llm.built.engine._runner, {}
    launch = runner.launch

    def launch_and_look(plan):  # type: ignore[no-untyped-def]
        launched = launch(plan)
        for row in {span.row for span in plan.spans if span.samples}:
            table = runner._rows.tokens[row].tolist()
            guesses[runner._rows.states[row].num_prompt, table[LENGTH]] = table[MODEL:NEXT]
        return launched

    if not steps_ahead:
        runner.launch = launch_and_look  # type: ignore[method-assign]
    answers = [list(one.token_ids) for one in llm.generate(prompts, sampling, max_new_tokens=32)]
    assert drafter == "off" or llm.built.scheduler.counters.draft_tokens
    assert llm.built.pool.num_free == llm.built.pool.num_blocks
    llm.close()
    return answers, guesses


def test_answers_do_not_change_with_a_draft_model() -> None:
    with tempfile.TemporaryDirectory() as path:
        (Path(path) / "target").mkdir()
        folder, head = make_folder(Path(path) / "target"), make_head(Path(path) / "head")
        for temperature in (0.0, 0.8):
            expected, _ = run(folder, DEVICE, "bfloat16", "off", "exact", 1, temperature)
            for drafter, steps_ahead in ((f"eagle3:{head}", 0), (f"eagle3:{head}", 1), (f"auto,eagle3:{head}", 1)):
                found, _ = run(folder, DEVICE, "bfloat16", drafter, "exact", steps_ahead, temperature)
                assert found == expected, f"{temperature=} {drafter=} {steps_ahead=}"


def test_guesses_are_those_of_a_cpu() -> None:
    """In float32, where rounding differs and tokens do not."""
    with tempfile.TemporaryDirectory() as path:
        (Path(path) / "target").mkdir()
        folder, head = make_folder(Path(path) / "target"), make_head(Path(path) / "head")
        for temperature in (0.0, 0.8):
            expected = run(folder, "cpu", "float32", f"eagle3:{head}", "fast", 0, temperature)
            found = run(folder, DEVICE, "float32", f"eagle3:{head}", "fast", 0, temperature)
            assert found[0] == expected[0]
            # How many drafts are verified depends on time. So steps end at different lengths, and a row may not have a
            # block for the last guesses.
            both = found[1].keys() & expected[1].keys()
            same = sum(
                all(a == b or min(a, b) < 0 for a, b in zip(found[1][key], expected[1][key], strict=True))
                for key in both
            )
            assert same > 0.99 * len(both) > 100, f"{same} of {len(both)} have the same guesses"


if __name__ == "__main__":
    for test in (test_answers_do_not_change_with_a_draft_model, test_guesses_are_those_of_a_cpu):
        test()
        print(f"{test.__name__}: ok", flush=True)
