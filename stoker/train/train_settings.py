"""The settings of `stoker train-draft`."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.settings import check_settings, setting

_SMALL_VOCAB, _SMALL_DRAFT_VOCAB, _LARGE_DRAFT_VOCAB = 65_536, 8192, 32_000


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a draft head is trained."""

    # ---- answers
    max_prompts: int | None = setting(
        None, "Use at most this many prompts, chosen by the seed.", flag="--max-prompts", ge=2, default_text="all"
    )
    prompt_tokens: int = setting(
        1024, "Longest prompt. Longer ones are left out.", flag="--prompt-tokens", unit="tokens", ge=1
    )
    text_tokens: int = setting(
        64,
        "Length of the prompt that is cut from a line of plain text. The model continues it.",
        flag="--text-tokens",
        unit="tokens",
        ge=1,
    )
    answer_tokens: int = setting(
        320, "Longest answer that the model writes to a prompt.", flag="--answer-tokens", unit="tokens", ge=2
    )
    temperature: float = setting(
        0.8, "Sampling temperature of the answers that are not greedy.", flag="--temperature", ge=0, le=2
    )
    sampled_share: float = setting(
        0.3, "Share of the answers that are sampled. The others are greedy.", flag="--sampled-share", ge=0, le=1
    )
    held_out: int = setting(
        64,
        "Prompts that are kept for the evaluation, at most a tenth of all prompts. No answer to them is trained on.",
        flag="--held-out",
        ge=1,
    )
    # ---- head
    draft_vocab: int | None = setting(
        None,
        "Tokens that the head can draft: the most frequent ones of the answers.",
        flag="--draft-vocab",
        unit="tokens",
        ge=1,
        default_text="8192 for a model of less than 65536 tokens, else 32000, and never more than the model has",
    )
    unroll: int = setting(
        5,
        "Steps of the head on its own hidden states while it is trained. Serving drafts up to 8 tokens.",
        flag="--unroll",
        ge=1,
        le=16,
    )
    step_weight: float = setting(
        0.8, "Weight of each further step's loss, relative to the step before.", flag="--step-weight", gt=0, le=1
    )
    # ---- optimiser
    epochs: int = setting(8, "Passes over all answers.", flag="--epochs", ge=1)
    batch_tokens: int | None = setting(
        None,
        "Tokens of one training step. Less needs less memory.",
        flag="--batch-tokens",
        unit="tokens",
        ge=16,
        default_text="65536 on a GPU, 2048 on a CPU",
    )
    learning_rate: float = setting(8e-4, "Highest learning rate.", flag="--learning-rate", gt=0, le=1)
    warmup_steps: int = setting(
        100,
        "Steps until the learning rate is at its highest, at most a tenth of all steps. Then it falls along a cosine.",
        flag="--warmup-steps",
        ge=0,
    )
    clip_norm: float = setting(1.0, "Largest norm of the gradients of a step.", flag="--clip-norm", gt=0)
    checkpoint_s: float = setting(
        60.0, "Time between two checkpoints. 0 saves after each step.", flag="--checkpoint-s", unit="s", ge=0
    )
    # ---- machine
    seed: int = setting(0, "Seed of everything random.", flag="--seed", ge=0)
    device: str | None = setting(
        None,
        "Where to train: cpu, cuda or cuda:N.",
        flag="--device",
        metavar="DEVICE",
        default_text="a GPU if there is one",
    )
    dtype: str | None = setting(
        None,
        "Data type of the served model during training. The head is trained in float32, or in float64 with a model in "
        "float64.",
        flag="--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        default_text="bfloat16 on a GPU, float32 on a CPU",
    )
    num_threads: int | None = setting(
        None, "CPU threads.", flag="--threads", ge=1, default_text="all cores for training, tuned for answers"
    )

    def __post_init__(self) -> None:
        check_settings(self, "train")

    def draft_vocab_of(self, vocab_size: int) -> int:
        """Return the size of the draft vocabulary for a model with this vocabulary."""
        default = _SMALL_DRAFT_VOCAB if vocab_size < _SMALL_VOCAB else _LARGE_DRAFT_VOCAB
        return min(default, vocab_size) if self.draft_vocab is None else self.draft_vocab
