"""A GGUF file becomes a Hugging Face folder with the same values, shapes and tokens; unsupported content is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from tiny_gguf import TOKENS, USER_DEFINED, VOCAB, Array, TinyGguf
from tokenizers import Tokenizer

from stoker.base.errors import ModelFilesError
from stoker.checkpoint import gguf_weights
from stoker.checkpoint.gguf_config import llama3_divisors
from stoker.checkpoint.gguf_file import GROUPED_TYPES
from stoker.checkpoint.progress import silent
from stoker.checkpoint.source import resolve_model


def convert(tiny: TinyGguf, path: Path, cache_dir: Path) -> tuple[Path, dict[str, Array]]:
    expected = tiny.write(path)
    return resolve_model(str(path), cache_dir, silent).path, expected


def dequantised(found: dict[str, Array], name: str) -> Array:
    if f"{name}_scale" not in found:
        return found[name]
    scale, minimum = (found[f"{name}_{part}"].astype(np.float32)[..., None] for part in ("scale", "min"))
    groups = found[name].astype(np.float32).reshape(*scale.shape[:2], -1)
    return (groups * scale + minimum).reshape(found[name].shape)


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def words(folder: Path, text: str) -> list[str]:
    return [word for word, _ in tokenizer_of(folder).pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_every_type_comes_out_as_it_dequantizes(arch: str, kind: Kind, gguf_path: Path, cache_dir: Path) -> None:
    folder, expected = convert(TinyGguf(arch=arch, kind=kind), gguf_path, cache_dir)
    found = load_file(folder / "model.safetensors")
    quantised = {name for name, values in expected.items() if kind in GROUPED_TYPES and values.ndim == 2}
    assert found.keys() == expected.keys() | {f"{name}_{part}" for name in quantised for part in ("scale", "min")}
    assert {name for name, values in found.items() if values.dtype == np.int8} == quantised
    for name, values in expected.items():
        np.testing.assert_array_equal(dequantised(found, name), values, err_msg=name)
    config = json.loads((folder / "config.json").read_text())
    named = config.get("quantization_config", {"modules": []})["modules"]
    assert {f"{module}.weight" for module in named} == quantised


@pytest.mark.parametrize("odd", ["attn_v", "ffn_up"])
def test_a_weight_is_not_quantised_if_one_that_is_fused_with_it_is_not(
    odd: str, gguf_path: Path, cache_dir: Path
) -> None:
    tiny = TinyGguf(kind=Kind.Q4_0, kinds={f"blk.1.{odd}.weight": Kind.F16, "blk.0.attn_q.weight": Kind.Q8_0})
    folder, expected = convert(tiny, gguf_path, cache_dir)
    found = load_file(folder / "model.safetensors")
    for name, values in expected.items():
        np.testing.assert_array_equal(dequantised(found, name), values, err_msg=name)
    plain = {name for name, values in found.items() if values.ndim == 2 and values.dtype == np.float32}
    fused = {"attn_v": ("self_attn", "qkv"), "ffn_up": ("mlp", ("gate", "up"))}[odd]
    assert plain == {f"model.layers.1.{fused[0]}.{part}_proj.weight" for part in fused[1]}


def test_small_chunks_give_the_same_file(gguf_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_weights, "CHUNK_BYTES", 1000)
    folder, expected = convert(TinyGguf(kind=Kind.Q8_0), gguf_path, cache_dir)
    found = load_file(folder / "model.safetensors")
    for name, values in expected.items():
        np.testing.assert_array_equal(dequantised(found, name), values, err_msg=name)


@pytest.mark.parametrize(("arch", "tied"), [("llama", True), ("llama", False), ("qwen3", True), ("qwen3", False)])
def test_config_has_the_models_sizes(arch: str, tied: bool, gguf_path: Path, cache_dir: Path) -> None:
    folder, expected = convert(TinyGguf(arch=arch, tied=tied), gguf_path, cache_dir)
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]],
        "model_type": arch,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert ("lm_head.weight" in expected) is not tied


def test_a_chat_models_second_eos_token_is_in_the_generation_config(gguf_path: Path, cache_dir: Path) -> None:
    folder, _ = convert(TinyGguf(metadata={"tokenizer.ggml.eot_token_id": 0}), gguf_path, cache_dir)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0]}


@pytest.mark.parametrize(
    "scaling",
    [
        {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 4.0},
        {"qwen3.rope.scaling.factor": 4.0},  # llama.cpp treats it as linear
        {"qwen3.rope.scale_linear": 4.0},  # in files from 2023
    ],
)
def test_rope_scaling_is_carried_over(scaling: dict[str, Any], gguf_path: Path, cache_dir: Path) -> None:
    folder, _ = convert(TinyGguf(arch="qwen3", metadata=scaling), gguf_path, cache_dir)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config["rope_parameters"] == {**config["rope_scaling"], "rope_theta": 50000.0}


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_rope_scaling_that_the_engine_would_refuse_is_refused_before_the_conversion(
    kind: str, gguf_path: Path, cache_dir: Path
) -> None:
    scaling = {
        "qwen3.rope.scaling.type": kind,
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 128,
    }
    with pytest.raises(ModelFilesError, match=f"'{kind}' is not supported"):
        convert(TinyGguf(arch="qwen3", metadata=scaling), gguf_path, cache_dir)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_3s_rope_factors_become_its_scaling(gguf_path: Path, cache_dir: Path) -> None:
    rope = {**LLAMA3, "rope_theta": 50000.0}
    factors = llama3_divisors(rope, 32).astype(np.float32)
    folder, expected = convert(TinyGguf(extra={"rope_freqs.weight": factors}), gguf_path, cache_dir)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"] == rope
    assert load_file(folder / "model.safetensors").keys() == expected.keys()


def test_rope_factors_together_with_a_scaling_are_refused(gguf_path: Path, cache_dir: Path) -> None:
    plain, llama3 = np.ones(16, np.float32), llama3_divisors({**LLAMA3, "rope_theta": 50000.0}, 32).astype(np.float32)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    folder, _ = convert(TinyGguf(metadata=scaling, extra={"rope_freqs.weight": plain}), gguf_path, cache_dir)
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ModelFilesError, match=r"together with rope_freqs\.weight is not supported"):
        convert(TinyGguf(metadata=scaling, extra={"rope_freqs.weight": llama3}), gguf_path, cache_dir)


def test_rope_factors_of_another_kind_are_refused(gguf_path: Path, cache_dir: Path) -> None:
    factors = np.linspace(1, 3, 16, dtype=np.float32)
    with pytest.raises(ModelFilesError, match=r"rope_freqs\.weight"):
        convert(TinyGguf(extra={"rope_freqs.weight": factors}), gguf_path, cache_dir)


def test_special_and_user_defined_tokens(gguf_path: Path, cache_dir: Path) -> None:
    folder, _ = convert(TinyGguf(), gguf_path, cache_dir)
    tokenizer = tokenizer_of(folder)
    ids = tokenizer.encode("<|im_start|>hello<tool_call>").ids
    assert [TOKENS[number] for number in ids] == ["<|im_start|>", "hello", USER_DEFINED]
    assert tokenizer.decode(ids) == "hello<tool_call>"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == tuple(
        TOKENS[number] for number in (1, 2, 0)
    )
    assert config["chat_template"] == "{{ messages }}"
    assert config["model_max_length"] == 512


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["I", "'ve", "Ġ", "1", "2", "3", "4", "Ġcats", "!", "Ċ"]),
        ("qwen2", ["I", "'ve", "Ġ", "1", "2", "3", "4", "Ġcats", "!Ċ"]),
        ("llama-bpe", ["I", "'ve", "Ġ", "123", "4", "Ġcats", "!Ċ"]),
    ],
)
def test_words_are_split_as_the_family_does(pre: str, expected: list[str], gguf_path: Path, cache_dir: Path) -> None:
    folder, _ = convert(TinyGguf(pre=pre), gguf_path, cache_dir)
    assert words(folder, "I've 1234 cats!\n") == expected


@pytest.mark.parametrize(
    "text", ["hello  world", "２０2 x\u00a0y", "\t\r\n  a", "naïve 🔥 2026", "<|im_end|> <tool_call>"]
)
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_tokenized_text_decodes_to_itself(pre: str, text: str, gguf_path: Path, cache_dir: Path) -> None:
    folder, _ = convert(TinyGguf(pre=pre), gguf_path, cache_dir)
    tokenizer = tokenizer_of(folder)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "said", "first"), [("llama-bpe", {}, 1), ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, None)]
)
def test_text_begins_with_bos_where_the_file_says_so(
    pre: str, said: dict[str, bool], first: int | None, gguf_path: Path, cache_dir: Path
) -> None:
    folder, _ = convert(TinyGguf(pre=pre, metadata=said), gguf_path, cache_dir)
    ids = tokenizer_of(folder).encode("hello").ids
    hello = [TOKENS.index("hello")]
    assert ids == (hello if first is None else [first, *hello])


@pytest.mark.parametrize(
    ("tiny", "said"),
    [
        (TinyGguf(arch="mamba"), "architecture 'mamba'.*llama, qwen3"),
        (TinyGguf(pre="tekken"), "'tekken'.*smollm, qwen2, llama-bpe"),
        (TinyGguf(metadata={"split.count": 3}), "one of 3 parts"),
        (TinyGguf(metadata={"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}), "'longrope'"),
        (TinyGguf(metadata={"llama.rope.dimension_count": 8}), r"rope\.dimension_count is 8"),
        (TinyGguf(extra={"blk.0.attn_q.bias": np.zeros(128, np.float32)}), r"blk\.0\.attn_q\.bias"),
        (TinyGguf(without=frozenset({"blk.1.ffn_up.weight"})), r"no tensor blk\.1\.ffn_up\.weight"),
        (TinyGguf(head=16, metadata={"llama.vocab_size": 1}, without=frozenset({"token_embd.weight"})), "token_embd"),
        (TinyGguf(merges=["h e", "x yz"]), "merges.*x.*yz"),
        (TinyGguf(tokens=[*TOKENS[:-1], TOKENS[-2]]), "tokens"),
        (TinyGguf(metadata={"tokenizer.ggml.padding_token_id": 9999}), "9999"),
    ],
)
def test_unsupported_content_is_named(tiny: TinyGguf, said: str, gguf_path: Path, cache_dir: Path) -> None:
    with pytest.raises(ModelFilesError, match=said) as caught:
        convert(tiny, gguf_path, cache_dir)
    assert str(gguf_path) in caught.value.message
    assert not [path for path in (cache_dir / "models").iterdir() if path.suffix != ".lock"]


def test_an_unknown_type_is_refused_with_the_tensors_name(gguf_path: Path, cache_dir: Path) -> None:
    writer = gguf.GGUFWriter(gguf_path, "llama")
    row_bytes = gguf.GGML_QUANT_SIZES[Kind.Q6_K][1]
    writer.add_tensor("token_embd.weight", np.zeros((4, row_bytes), np.uint8), raw_dtype=Kind.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFilesError, match=r"token_embd\.weight has the type Q6_K.*Q4_0, Q4_1, Q8_0"):
        resolve_model(str(gguf_path), cache_dir, silent)


@pytest.mark.parametrize("num_bytes", [0, 3, 20, 1000, 9000, -1])
def test_a_truncated_file_is_named(num_bytes: int, gguf_path: Path, cache_dir: Path) -> None:
    TinyGguf().write(gguf_path)
    gguf_path.write_bytes(gguf_path.read_bytes()[:num_bytes])
    with pytest.raises(ModelFilesError, match=r"tiny\.gguf.*Download it again"):
        resolve_model(str(gguf_path), cache_dir, silent)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_1, Kind.Q8_0])
def test_weights_that_are_not_numbers_are_refused(kind: Kind, gguf_path: Path, cache_dir: Path) -> None:
    TinyGguf(kind=kind).write(gguf_path)
    tensor = next(tensor for tensor in gguf.GGUFReader(gguf_path).tensors if tensor.name == "blk.1.ffn_up.weight")
    content = bytearray(gguf_path.read_bytes())
    content[tensor.data_offset : tensor.data_offset + 4] = b"\xff\x7f\xff\x7f"
    gguf_path.write_bytes(content)
    with pytest.raises(ModelFilesError, match=r"blk\.1\.ffn_up\.weight holds values that are not finite"):
        resolve_model(str(gguf_path), cache_dir, silent)


def test_another_file_called_gguf_is_named(gguf_path: Path, cache_dir: Path) -> None:
    gguf_path.write_bytes(b"<html>404</html>" * 10)
    with pytest.raises(ModelFilesError, match="does not begin with 'GGUF'"):
        resolve_model(str(gguf_path), cache_dir, silent)


def test_a_damaged_header_gives_a_clear_error(gguf_path: Path, cache_dir: Path) -> None:
    TinyGguf().write(gguf_path)
    whole = gguf_path.read_bytes()
    head_bytes = gguf.GGUFReader(gguf_path).data_offset
    random = np.random.default_rng(3)
    refused = 0
    for trial in range(150):
        broken = bytearray(whole)
        for at in random.integers(4, head_bytes, 3):
            broken[at] = random.integers(256)
        path = gguf_path.with_name(f"{trial}.gguf")
        path.write_bytes(broken)
        try:
            resolve_model(str(path), cache_dir, silent)
        except ModelFilesError:
            refused += 1
        path.unlink()
    assert refused > 20
