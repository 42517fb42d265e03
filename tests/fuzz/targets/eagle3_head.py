"""The config.json and the tensor names of an EAGLE-3 draft head."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.weight_files import SINGLE
from stoker.models.eagle3_weights import Eagle3Checkpoint
from stoker.models.family import ModelShape
from tests.fuzz.target import FuzzTarget

_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-eagle3-"))
_MARK = b"\n--file--\n"  # between config.json and the header of the weights
_TARGET = ModelShape(
    vocab_size=64,
    hidden_size=16,
    max_positions=64,
    num_layers=6,
    num_kv_heads=2,
    head_dim=8,
    num_heads=2,
    active_weights=1000,
)
_LAYER = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def execute(data: bytes, rng: random.Random) -> None:
    config, _, header = data.partition(_MARK)
    try:
        hf = json.loads(config)
    except (ValueError, RecursionError):
        return  # read_hf_config refuses it
    if not isinstance(hf, dict):
        return
    (_FOLDER / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    checkpoint = Eagle3Checkpoint(hf, _FOLDER, _TARGET)
    assert checkpoint.kv_group.num_heads >= 1
    assert checkpoint.num_heads % checkpoint.kv_group.num_heads == 0


def seeds() -> list[bytes]:
    specforge = _LAYER | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 32,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    speculators = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 32,
        "transformer_layer_config": _LAYER | {"model_type": "qwen3"},
        "eagle_aux_hidden_state_layer_ids": [0, 3, 6],
    }
    latent = specforge | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0},
    }
    header = json.dumps(
        {
            "midlayer.norm.weight": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
            "t2d": {"dtype": "BOOL", "shape": [32], "data_offsets": [32, 64]},
        }
    ).encode()
    return [json.dumps(config).encode() + _MARK + header for config in (specforge, speculators, latent)]


TARGET = FuzzTarget(
    execute,
    seeds,
    errors=(ModelFilesError,),
    tokens=[
        b'"fc_norm":true',
        b"null",
        b"[1,2,3]",
        b'"d2t"',
        b'"lm_head.weight"',
        b'"model.',
        b'"layers.0.',
        b"-1",
        b"1e9",
    ],
    is_network=False,
)
