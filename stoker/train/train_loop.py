"""The training loop: batches, optimiser, checkpoints.

Everything random is a function of the seed and the step, so a checkpoint needs no generator. A training that continues
from a checkpoint computes the same bits as one that was not interrupted, where torch does: on a CPU with one thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors

from stoker.base.errors import StokerError
from stoker.sched.draft_tape import MODEL_GUESSES
from stoker.train.draft_vocab import DraftVocab
from stoker.train.target_forward import TargetForward
from stoker.train.train_settings import TrainSettings
from stoker.train.trainable_head import TrainableHead
from stoker.train.unroll import Answer, make_batch, unrolled_loss
from stoker.train.work_folder import WorkFolderError, check_same, write_file

_BETAS = (0.9, 0.95)
_LAST_RATE = 0.025  # the last learning rate, as a part of the highest one
_SMOOTHING = 0.05  # weight of the newest step in the values that are shown
_MOMENTS = ("exp_avg", "exp_avg_sq")
_HISTORY = 50  # points of the loss curve in the report


class TrainingDiverged(StokerError):
    """The loss is not a finite number any more."""

    code = "training_diverged"


@dataclass(slots=True)
class TrainState:
    """How far the training is, and smoothed values of the last steps."""

    step: int = 0
    loss: float = 0.0
    acceptance: list[float] | None = None  # of each unrolled step, if those before it were right
    history: list[tuple[int, float, float]] | None = None  # step, loss, tokens per step

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a decode step with as many drafts as the engine verifies, as far as training can tell."""
        chances, chance = 1.0, 1.0
        for rate in (self.acceptance or ())[:MODEL_GUESSES]:
            chance *= rate
            chances += chance
        return chances


def plan_batches(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of one epoch: numbers of answers of similar length. Padded to its longest answer, a batch has at
    most `batch_tokens` tokens, or one answer. Each epoch has the same number of batches."""
    generator = torch.Generator().manual_seed((seed << 16) + epoch)
    order = sorted(torch.randperm(len(lengths), generator=generator).tolist(), key=lambda number: lengths[number])
    batches: list[list[int]] = [[]]
    for number in order:  # ascending lengths, so that each one would be the longest of its batch
        if batches[-1] and (len(batches[-1]) + 1) * lengths[number] > batch_tokens:
            batches.append([])
        batches[-1].append(number)
    return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def learning_rate(step: int, num_steps: int, settings: TrainSettings) -> float:
    """Return the rate of a step: a linear warm-up, then a cosine."""
    warmup = min(settings.warmup_steps, num_steps // 10)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    part = (step - warmup) / max(1, num_steps - warmup)
    return settings.learning_rate * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * part)))


class Trainer:
    """Trains one head. `identity` is what a checkpoint must agree with."""

    def __init__(
        self,
        head: TrainableHead,
        target: TargetForward,
        answers: Sequence[Answer],
        vocab: DraftVocab,
        settings: TrainSettings,
        batch_tokens: int,
        identity: Mapping[str, Any],
    ) -> None:
        self.head, self.state = head, TrainState()
        self._target, self._answers, self._vocab = target, answers, vocab
        self._settings, self._batch_tokens, self._identity = settings, batch_tokens, identity
        self._lengths = [len(answer.token_ids) for answer in answers]
        self._epoch, self._batches = 0, plan_batches(self._lengths, batch_tokens, settings.seed, 0)
        self.num_steps = len(self._batches) * settings.epochs
        self._optimizer = torch.optim.AdamW(head.parameters(), settings.learning_rate, _BETAS, weight_decay=0.0)

    @property
    def is_done(self) -> bool:
        return self.state.step >= self.num_steps

    def step(self) -> int:
        """Train on the next batch. Return its number of tokens. Raises TrainingDiverged."""
        state, settings = self.state, self._settings
        answers = [self._answers[number] for number in self._batch(state.step)]
        batch = make_batch(self._target, answers, self._vocab, self.head.norm.weight.dtype)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(state.step, self.num_steps, settings)
        self._optimizer.zero_grad()
        with self._precision():
            result = unrolled_loss(self.head, batch, settings.unroll, settings.step_weight)
        torch.autograd.backward(result.loss)
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), settings.clip_norm)
        loss = float(result.loss.detach())
        if not math.isfinite(loss) or not math.isfinite(float(norm)):
            raise TrainingDiverged(
                f"step {state.step}: the loss is {loss} and the norm of the gradients {float(norm)}; lower "
                f"--learning-rate (now {settings.learning_rate:g}) and remove the checkpoint from the work folder"
            )
        self._optimizer.step()
        self._record(loss, result.right, result.guesses)
        return sum(len(answer.token_ids) for answer in answers)

    def _batch(self, step: int) -> list[int]:
        epoch, place = divmod(step, len(self._batches))
        if epoch != self._epoch:
            self._epoch = epoch
            self._batches = plan_batches(self._lengths, self._batch_tokens, self._settings.seed, epoch)
        return self._batches[place]

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the context in which matmuls run in bfloat16 on a GPU, with the weights in float32."""
        on_gpu = self._target.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()

    def _record(self, loss: float, right: list[int], guesses: list[int]) -> None:
        state = self.state
        rates = [number / max(1, count) for number, count in zip(right, guesses, strict=True)]
        if state.acceptance is None:
            state.loss, state.acceptance, state.history = loss, rates, []
        state.loss += _SMOOTHING * (loss - state.loss)
        # A batch of very short answers has fewer steps.
        for place, rate in enumerate(rates[: len(state.acceptance)]):
            state.acceptance[place] += _SMOOTHING * (rate - state.acceptance[place])
        if state.step % max(1, self.num_steps // _HISTORY) == 0 and state.history is not None:
            state.history.append((state.step, round(state.loss, 4), round(state.tokens_per_step, 3)))
        state.step += 1

    # ---- checkpoints

    def save(self, path: Path) -> None:
        """Replace the checkpoint."""
        tensors = {}
        for name, parameter in self.head.named_parameters():
            tensors[f"head.{name}"] = parameter.detach()
            for moment in _MOMENTS if parameter in self._optimizer.state else ():
                tensors[f"{moment}.{name}"] = self._optimizer.state[parameter][moment]
        state = self.state
        about = {
            "identity": self._identity,
            "state": [state.step, state.loss, state.acceptance, state.history],
        }
        metadata = {"stoker": json.dumps(about)}
        write_file(path, save_tensors({name: tensor.cpu() for name, tensor in tensors.items()}, metadata))

    def load(self, path: Path) -> None:
        """Continue from a checkpoint. Raises ConfigError for one of other settings, WorkFolderError for a damaged one."""
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {})["stoker"])
                what_to_do = f"give the same settings, or remove {path} to train again with the same answers"
                check_same(f"the checkpoint {path}", about["identity"], self._identity, what_to_do)
                step, loss, acceptance, history = about["state"]
                for name, parameter in self.head.named_parameters():
                    parameter.data.copy_(file.get_tensor(f"head.{name}"))
                    moments = {moment: file.get_tensor(f"{moment}.{name}").to(parameter) for moment in _MOMENTS}
                    self._optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise WorkFolderError(
                f"{path} is damaged ({error}); remove it to train again with the same answers"
            ) from error
        self.state = TrainState(step, loss, acceptance, None if history is None else [tuple(one) for one in history])
