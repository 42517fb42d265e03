"""Trains an EAGLE-3 head for a model, from prompts to a folder that `--drafter eagle3:FOLDER` loads."""

from __future__ import annotations

import hashlib
import json
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from stoker.base.allowance import usable_cores
from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.errors import ConfigError
from stoker.engine.build import build_engine
from stoker.engine.memory import ResolvedSettings, resolve
from stoker.engine.model_identity import read_hf_config
from stoker.models.eagle3_config import Eagle3Config, read_eagle3_config
from stoker.models.family import ModelShape, family_of
from stoker.sched.request import SamplingParams
from stoker.train.answers import PER_FILE, AnswerPlan, answer_arrays, generate_answers, read_answers
from stoker.train.draft_vocab import DraftVocab, check_draft_vocab
from stoker.train.evaluate import measure_acceptance
from stoker.train.head_files import REPORT, check_out, head_config, replaced_folder, write_head
from stoker.train.release import release_engines
from stoker.train.target_forward import TargetForward
from stoker.train.train_loop import Trainer, TrainState, plan_batches
from stoker.train.train_settings import TrainSettings
from stoker.train.trainable_head import TrainableHead
from stoker.train.unroll import Answer
from stoker.train.work_folder import WorkFolder, model_identity, require_space, write_file

_BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}
_MIN_ANSWER = 2  # tokens; a shorter answer has nothing to draft
# Settings that change no bit of the result, or that are part of the answers' identity.
_FREE = ("checkpoint_s", "num_threads")
_OF_ANSWERS = ("answer_tokens", "temperature", "sampled_share", "seed")
_OF_PROMPTS = ("max_prompts", "prompt_tokens", "text_tokens", "held_out")


class TrainInterrupted(Exception):
    """The training was asked to stop. Its state is saved."""


class TrainProgress(Protocol):
    """A function that is called again and again during the training."""

    def __call__(self, stage: str, done: int, total: int, state: TrainState | None = None) -> None:
        """Report that `stage` is at `done` of `total`. `state` has the loss, during training."""


@dataclass(frozen=True, slots=True)
class TrainJob:
    """A model, the prompts to train on, and where the results go."""

    model: Path
    prompts: Sequence[Sequence[int]]
    stop_token_ids: tuple[int, ...]
    work: Path
    out: Path
    name: str = ""  # of the model, for the report


@dataclass(frozen=True, slots=True)
class _TrainedModel:
    """The model that a head is trained for."""

    folder: Path
    hf: Mapping[str, Any]
    shape: ModelShape
    resolved: ResolvedSettings
    engine: EngineSettings

    @classmethod
    def open(cls, folder: Path, settings: TrainSettings) -> _TrainedModel:
        hf = read_hf_config(folder)
        shape = family_of(hf, str(folder / "config.json")).shape
        engine = EngineSettings(
            device=settings.device, dtype=settings.dtype, num_threads=settings.num_threads, spare_engine="off"
        )
        resolved = resolve(engine, shape)
        if resolved.device.type == "cpu":
            # Answers must not depend on what a restart finds in the prefix cache, nor on a measurement.
            engine = replace(engine, numerics="exact", cpu_weights="float32")
        return cls(folder, hf, shape, resolved, engine)

    @property
    def kind(self) -> str:
        return self.resolved.device.type


def train_draft(
    job: TrainJob, settings: TrainSettings, progress: TrainProgress, should_stop: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Train a head, and return the report that is written beside it.

    Continues what the work folder has. Raises TrainInterrupted, after saving, if `should_stop` returns True.
    """
    target = _TrainedModel.open(job.model, settings)
    check_out(job.out)
    draft_vocab = settings.draft_vocab_of(target.shape.vocab_size)
    check_draft_vocab(draft_vocab, target.shape.vocab_size)
    training, held_out = split_prompts(job.prompts, settings, target.shape)
    config = head_config(target.hf, target.shape, draft_vocab)
    head_shape = read_eagle3_config(config, target.shape)
    work = WorkFolder(job.work)
    with work.locked():
        plan = AnswerPlan(**{name: getattr(settings, name) for name in _OF_ANSWERS}, stop_token_ids=job.stop_token_ids)
        work.claim(_answers_identity(target, plan, training, held_out))
        require_space(job.work, _needed_bytes(head_shape, training, settings))
        per_file = PER_FILE[target.kind]
        shown = lambda done, total: progress("generating answers", done, total)  # noqa: E731
        generate_answers(job.model, target.engine, training, plan, work.answers, per_file, shown)
        release_engines()
        answers = read_answers(work.answers, len(training), per_file, target.shape.vocab_size)
        answers = [one for one in answers if len(one.token_ids) - one.num_prompt >= _MIN_ANSWER]
        if not answers:
            raise ConfigError(f"--data: the model wrote no answer of {_MIN_ANSWER} tokens; give other prompts")
        vocab = DraftVocab.from_tokens(answer_arrays(answers), draft_vocab, target.shape.vocab_size)
        started_s = time.monotonic()
        head, trained = _train(target, head_shape, answers, vocab, settings, work, progress, should_stop)
        release_engines()
        report = _report(job, settings, answers, vocab, trained, time.monotonic() - started_s)
        with replaced_folder(job.out) as made:
            write_head(made, head, vocab, config)
            report["evaluation"] = _evaluate(target, made, held_out, plan, progress)
            release_engines()
            write_file(made / REPORT, json.dumps(report, indent=2).encode())
    return report


def split_prompts(
    prompts: Sequence[Sequence[int]], settings: TrainSettings, shape: ModelShape
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts to train on and the held-out ones, in an order that the seed gives. Raises ConfigError if there
    are too few, or if answers to them would not fit into the model's context."""
    longest = settings.prompt_tokens + settings.answer_tokens
    if longest > shape.max_positions:
        raise ConfigError(
            f"--prompt-tokens {settings.prompt_tokens} and --answer-tokens {settings.answer_tokens} are {longest} tokens, "
            f"and the model's context has {shape.max_positions}; lower one of them"
        )
    usable = [list(prompt) for prompt in prompts if 0 < len(prompt) <= settings.prompt_tokens]
    if outside := [token for prompt in usable for token in prompt if not 0 <= token < shape.vocab_size]:
        raise ConfigError(
            f"--data: token {outside[0]} of a prompt is not in the model's vocabulary of {shape.vocab_size}"
        )
    random.Random(settings.seed).shuffle(usable)
    usable = usable[: settings.max_prompts]
    if len(usable) < 2:
        raise ConfigError(
            f"--data: {len(usable)} of {len(prompts)} prompts have 1 to {settings.prompt_tokens} tokens, and at least 2 are "
            "needed; give more prompts or raise --prompt-tokens"
        )
    num_held_out = max(1, min(settings.held_out, len(usable) // 10))
    return usable[:-num_held_out], usable[-num_held_out:]


def _answers_identity(
    target: _TrainedModel, plan: AnswerPlan, training: list[list[int]], held_out: list[list[int]]
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for prompt in (*training, [-1], *held_out):
        digest.update(array("i", [len(prompt), *prompt]).tobytes())
    return {
        "model": model_identity(target.folder),
        "device": target.kind,
        "dtype": str(target.resolved.dtype).removeprefix("torch."),
        **{name: getattr(plan, name) for name in _OF_ANSWERS},
        "stop_token_ids": list(plan.stop_token_ids),
        "data": digest.hexdigest()[:16],  # last: other settings change the order of the prompts too
    }


def _training_identity(settings: TrainSettings, vocab: DraftVocab, batch_tokens: int) -> dict[str, Any]:
    """Return what a checkpoint depends on, besides the answers."""
    left_out = (*_FREE, *_OF_ANSWERS, *_OF_PROMPTS, "device", "dtype")
    given = {name: value for name, value in asdict(settings).items() if name not in left_out}
    return given | {"draft_vocab": len(vocab.ids), "batch_tokens": batch_tokens}


def _needed_bytes(config: Eagle3Config, prompts: list[list[int]], settings: TrainSettings) -> int:
    """Return the disk space of the answers, two checkpoints of weights and moments, and the head."""
    layer, heads = config.layer, config.grouped_attention
    hidden, attention = layer.hidden_size, (3 * heads.num_heads + 4 * heads.num_kv_heads) * heads.head_dim
    weights = hidden * (len(config.taps) * config.target_hidden_size + attention + 3 * config.mlp.intermediate_size)
    weights += hidden * config.draft_vocab_size
    answers = 4 * sum(len(prompt) + settings.answer_tokens for prompt in prompts)
    return answers + weights * (2 * 3 * 4 + 2) + 16 * layer.vocab_size


def _train(
    target: _TrainedModel,
    config: Eagle3Config,
    answers: list[Answer],
    vocab: DraftVocab,
    settings: TrainSettings,
    work: WorkFolder,
    progress: TrainProgress,
    should_stop: Callable[[], bool],
) -> tuple[TrainableHead, TrainState]:
    """Return the trained head on the CPU."""
    batch_tokens = settings.batch_tokens or _BATCH_TOKENS[target.kind]
    lengths = [len(answer.token_ids) for answer in answers]
    progress("loading the model", 0, 1)
    # The engine's own KV cache is not used.
    small = replace(target.engine, kv=KvSettings(num_blocks=4), sched=SchedSettings(max_rows=1), drafter="off")
    built = build_engine(target.folder, small)
    torch.set_num_threads(settings.num_threads or usable_cores())  # the engine may have chosen another number
    try:
        most_rows = max(len(batch) for batch in plan_batches(lengths, batch_tokens, 0, 0))
        most_tokens = max(batch_tokens, *lengths, 1)
        forward = TargetForward(built, target.shape.num_heads, config.taps, most_rows, most_tokens, max(lengths))
        head = _new_head(config, max(lengths) + settings.unroll, target.resolved, settings.seed)
        identity = _training_identity(settings, vocab, batch_tokens)
        trainer = Trainer(head, forward, answers, vocab, settings, batch_tokens, identity)
        if work.checkpoint.exists():
            trainer.load(work.checkpoint)
        _run(trainer, settings, work, progress, should_stop)
    finally:
        built.close()
    return head.cpu(), trainer.state


def _new_head(config: Eagle3Config, num_positions: int, resolved: ResolvedSettings, seed: int) -> TrainableHead:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if resolved.dtype == torch.float64 else torch.float32)
    try:
        return TrainableHead(config, num_positions, torch.Generator().manual_seed(seed)).to(resolved.device)
    finally:
        torch.set_default_dtype(default)


def _run(
    trainer: Trainer,
    settings: TrainSettings,
    work: WorkFolder,
    progress: TrainProgress,
    should_stop: Callable[[], bool],
) -> None:
    saved_s = time.monotonic()
    while not trainer.is_done:
        progress("training", trainer.state.step, trainer.num_steps, trainer.state)
        trainer.step()
        if should_stop():
            trainer.save(work.checkpoint)
            raise TrainInterrupted
        if trainer.is_done or time.monotonic() - saved_s >= settings.checkpoint_s:
            trainer.save(work.checkpoint)
            saved_s = time.monotonic()
    progress("training", trainer.num_steps, trainer.num_steps, trainer.state)


def _report(
    job: TrainJob,
    settings: TrainSettings,
    answers: list[Answer],
    vocab: DraftVocab,
    state: TrainState,
    train_s: float,
) -> dict[str, Any]:
    return {
        "model": job.name or job.model.name,
        "settings": asdict(settings),
        "prompts": len(answers),
        "answer_tokens": sum(len(answer.token_ids) - answer.num_prompt for answer in answers),
        "draft_vocab": len(vocab.ids),
        "draft_vocab_coverage": round(vocab.coverage, 4),
        "steps": state.step,
        "loss": round(state.loss, 4),
        "train_s": round(train_s, 1),  # of the last run, if the training was interrupted
        "history": state.history or [],
    }


def _evaluate(
    target: _TrainedModel, head: Path, prompts: list[list[int]], plan: AnswerPlan, progress: TrainProgress
) -> dict[str, Any]:
    """Return the real acceptance, greedy and at the temperature of the answers."""
    progress("evaluating", 0, 1)
    temperatures = {"greedy": 0.0} | ({"sampled": plan.temperature} if plan.temperature > 0 else {})
    samplings = [
        SamplingParams(temperature=temperature, seed=plan.seed, stop_token_ids=plan.stop_token_ids)
        for temperature in temperatures.values()
    ]
    found = measure_acceptance(target.folder, target.engine, head, prompts, samplings, plan.answer_tokens)
    progress("evaluating", 1, 1)
    return {name: measured.as_json() for name, measured in zip(temperatures, found, strict=True)}
