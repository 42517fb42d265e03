"""Loads the weights of an EAGLE-3 head. The public formats have the same tensors under different names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.weight_files import TensorLocation, stored_tensors
from stoker.layers.linear import Linear
from stoker.layers.mla import MlaConfig
from stoker.layers.quant import PLAIN
from stoker.models.dense import WeightNames
from stoker.models.draft import DraftTarget
from stoker.models.eagle3 import Eagle3Head
from stoker.models.eagle3_config import Eagle3Config, read_eagle3_config
from stoker.models.family import ModelShape, Rule
from stoker.models.fill import Progress
from stoker.models.latent import LatentNames
from stoker.models.quantisation import matmul_rules
from stoker.models.weights import load

# Other names of tensors, in the order in which they are replaced.
_RENAMED = (
    ("model.", ""), ("midlayer.", "layers.0."), ("aux_norm_low.", "fc_norm.0."), ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."), ("layers.0.self_attn.kv_a_proj.", "layers.0.self_attn.kv_a_proj_with_mqa."),
)  # fmt: skip
# Known and not needed here: the inverse of d2t, rotary tables, and what speculators keeps for training.
_IGNORED = ("t2d", "layers.0.self_attn.rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


class Eagle3Checkpoint:
    """The files of a head, checked against the target model. Raises ModelFilesError, with the name of the tensor or
    field, for files that do not fit to each other or to the target model."""

    def __init__(self, hf: Mapping[str, Any], folder: Path, target: ModelShape) -> None:
        """`hf` is the content of the folder's config.json."""
        self.folder = folder
        try:
            self._config = config = read_eagle3_config(hf, target)
        except ModelFilesError as error:
            raise ModelFilesError(f"draft head {folder}: {error.message}", code=error.code) from error
        self._stored = stored_tensors(folder)
        self._names = names = _canonical_names(self._stored, folder)
        self._has_embedding, self._has_head = "embed_tokens.weight" in names, "lm_head.weight" in names
        _check_shared(config, folder, has_embedding=self._has_embedding, has_head=self._has_head)
        if "t2d" in names and self._stored[names["t2d"]].shape != (config.layer.vocab_size,):
            raise ModelFilesError(
                f"{folder}: tensor 't2d' is {self._stored[names['t2d']].shape}, config.json requires "
                f"({config.layer.vocab_size},)"
            )
        self.taps: Sequence[int] = config.taps
        self.kv_group = config.attention.kv_group(1)
        self.num_heads = config.attention.num_heads

    def build(self, target: DraftTarget, num_positions: int) -> Eagle3Head:
        """Build the head on torch's default device and in its default dtype, with empty parameters."""
        parts = {"has_embedding": self._has_embedding, "has_head": self._has_head}
        return Eagle3Head(self._config, target, num_positions, **parts)

    def load(self, head: Eagle3Head, progress: Progress) -> None:
        """Load the weights into a head that `build` returned. Call its `pack` afterwards."""
        names = self._names
        rules = [
            Rule(names.get(rule.source, rule.source), rule.target, rule.first, rule.count) for rule in _rules(head)
        ]
        ignored = frozenset(names[name] for name in _IGNORED if name in names)
        if head.d2t is None and "d2t" in names:
            _check_no_shift(self._stored[names["d2t"]])
            ignored |= {names["d2t"]}
        load(head, rules, ignored, self.folder, progress)
        head.share_embedding()


def _canonical_names(stored: dict[str, TensorLocation], folder: Path) -> dict[str, str]:
    """Return the name in the file of each tensor, by the name that it has here."""
    names: dict[str, str] = {}
    for name in stored:
        own = name
        for prefix, replacement in _RENAMED:
            if own.startswith(prefix):
                own = replacement + own.removeprefix(prefix)
        if own in names:
            raise ModelFilesError(f"{folder}: tensors {names[own]!r} and {name!r} are the same part of a draft head")
        names[own] = name
    return names


def _check_shared(config: Eagle3Config, folder: Path, *, has_embedding: bool, has_head: bool) -> None:
    """Check that what the checkpoint lacks can be taken from the target model."""
    layer = config.layer
    if not has_embedding and layer.hidden_size != config.target_hidden_size:
        raise ModelFilesError(
            f"{folder}: tensor 'embed_tokens.weight' is missing. The target model's cannot be used: its hidden size is "
            f"{config.target_hidden_size}, and the head's is {layer.hidden_size}"
        )
    is_shared = not has_head and (not layer.tie_embeddings or not has_embedding)
    if not has_head and config.draft_vocab_size != layer.vocab_size:
        raise ModelFilesError(
            f"{folder}: tensor 'lm_head.weight' is missing. The target model's cannot be used: it has "
            f"{layer.vocab_size} tokens, and draft_vocab_size is {config.draft_vocab_size}"
        )
    if is_shared and layer.hidden_size != config.target_hidden_size:
        raise ModelFilesError(
            f"{folder}: tensor 'lm_head.weight' is missing. The target model's cannot be used: its hidden size is "
            f"{config.target_hidden_size}, and the head's is {layer.hidden_size}"
        )


def _check_no_shift(stored: TensorLocation) -> None:
    """Check a d2t that covers the whole vocabulary: it must leave every token as it is."""
    with stored.file.open("rb") as file:
        file.seek(stored.offset)
        if any(file.read(stored.num_bytes)):
            raise ModelFilesError(
                f"{stored.file}: tensor 'd2t' moves tokens, but config.json's draft_vocab_size is the whole vocabulary"
            )


def _rules(head: Eagle3Head) -> list[Rule]:
    """Return which parameter each checkpoint tensor fills."""
    config, src = head.config, "layers.0."
    rules = [
        Rule("fc.weight", "fc.weight"),
        Rule("norm.weight", "norm.weight"),
        Rule(f"{src}hidden_norm.weight", "feature_norm.weight"),
    ]
    own: list[tuple[Any, Rule]] = [
        (head.embedding, Rule("embed_tokens.weight", "embedding.weight")),
        (isinstance(head.head, Linear), Rule("lm_head.weight", "head.weight")),
        (head.d2t is not None, Rule("d2t", "d2t")),
        (head.fc.joint_norm, Rule("input_norm.weight", "fc.joint_norm.weight")),
    ]
    rules += [rule for is_there, rule in own if is_there]
    rules += [Rule(f"fc_norm.{i}.weight", f"fc.norms.{i}.weight") for i in range(len(head.fc.norms))]
    names = LatentNames(config.layer) if isinstance(config.attention, MlaConfig) else WeightNames(config.layer)
    for matmul in (*names.attention_matmuls(config.attention, src, ""), *names.mlp_matmuls(config.mlp, src, "")):
        sources, parts = list(matmul.parts), list(matmul.parts.values())
        rules += matmul_rules(PLAIN, sources, matmul.target, parts, matmul.num_ins, matmul.bias)
    for rule in names.layer_rules(config.layer.layers[0], src, ""):
        if rule.target == "attention_norm.weight":  # the input of the layer is not its residual
            rule.target = "embedding_norm.weight"
        rules.append(rule)
    return rules
