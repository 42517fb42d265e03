"""`stoker train-draft`: trains an EAGLE-3 head, with which `stoker serve --drafter eagle3:FOLDER` drafts."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from stoker.base.errors import ConfigError, InvalidRequest
from stoker.base.flags import add_flags, as_table, given_flags
from stoker.base.output import print_message, print_result
from stoker.base.paths import expand_home
from stoker.base.settings import declared, from_table
from stoker.train.train_settings import TrainSettings

if TYPE_CHECKING:
    from rich.progress import TaskID

    from stoker.train.data_files import TrainingPrompt
    from stoker.train.train_loop import TrainState

NAME = "train-draft"
HELP = "train an EAGLE-3 draft head for a model"
DESCRIPTION = """Train an EAGLE-3 head, with which `stoker serve MODEL --drafter eagle3:OUT` drafts. The model first answers the
prompts of --data. The head then learns to guess these answers, and its real acceptance is measured on held-out prompts.
Everything is kept in the work folder: the same command continues after Ctrl-C or a crash, and loses at most the time
since the last checkpoint. docs/speculation.md explains the method."""

_LINE_EVERY_S = 30.0  # without a terminal
_TRAINING = "training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="A model folder, a GGUF file or a name on the Hugging Face hub. Default: SmolLM2-135M-Instruct.",
    )
    parser.add_argument(
        "--data",
        type=expand_home,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="Prompts: files of JSON lines, also compressed (.gz), each line with `messages`, `turns` or `text`. Of "
        "a conversation, the messages before one of its answers are the prompt. At least one file is required.",
    )
    parser.add_argument(
        "--out", type=expand_home, metavar="DIR", help="Folder for the trained head and its report. It is required."
    )
    parser.add_argument(
        "--work",
        type=expand_home,
        metavar="DIR",
        help="Folder for the answers and the checkpoint. Default: OUT with `.work` after its name.",
    )
    parser.add_argument(
        "--cache-dir", type=expand_home, metavar="DIR", help="The cache folder of models. Default: ~/.cache/stoker."
    )
    parser.add_argument("--offline", action="store_true", help="Download nothing.")
    add_flags(parser, declared(TrainSettings))


def run(args: argparse.Namespace) -> int:
    from stoker.checkpoint.source import default_cache_dir, resolve_model
    from stoker.cli.main import EXIT_INTERRUPTED
    from stoker.cli.serving import progress_line
    from stoker.train.data_files import read_data_files

    for flag, given in (("--data", args.data), ("--out", args.out)):
        if not given:
            raise ConfigError(f"{flag} is missing; `stoker {NAME} --help` explains it")
    settings = from_table(TrainSettings, as_table(given_flags(args, declared(TrainSettings))))
    sources = read_data_files(args.data, settings.seed)
    cache_dir: Path = args.cache_dir or default_cache_dir(os.environ)
    model = resolve_model(args.model, cache_dir, progress_line(), args.offline)
    prompts, stop_token_ids = tokenize(sources, model.path, settings)
    work: Path = args.work or args.out.with_name(f"{args.out.name}.work")

    from stoker.train.train_draft import TrainInterrupted, TrainJob, train_draft

    job = TrainJob(model.path, prompts, stop_token_ids, work, args.out, model.name)
    try:
        with stop_signals() as stop, progress_display() as show:

            def progress(stage: str, done: int, total: int, state: TrainState | None = None) -> None:
                stop.is_training = stage == _TRAINING
                show(stage, done, total, state)

            report = train_draft(job, settings, progress, lambda: stop.is_asked)
    except (TrainInterrupted, KeyboardInterrupt):
        print_message(f"stoker: stopped; {work} has what is done so far, and the same command continues", sys.stderr)
        return EXIT_INTERRUPTED
    print_result(_summary(report, args.out))
    return 0


def tokenize(
    sources: list[TrainingPrompt], folder: Path, settings: TrainSettings
) -> tuple[list[list[int]], tuple[int, ...]]:
    """Return the prompts' tokens, and the tokens that end an answer. Raises ConfigError, with file and line, for a prompt
    that the model's chat template refuses or that is empty."""
    from stoker.text.template import ChatTemplate
    from stoker.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)
    prompts = []
    for source in sources:
        try:
            if source.messages:
                token_ids = tokenizer.encode(template.render(source.messages, source.tools))
            else:
                token_ids = tokenizer.encode(source.text, add_special_tokens=True)[: settings.text_tokens]
        except InvalidRequest as error:
            raise ConfigError(f"{source.where}: {error.message}; correct or remove the line") from error
        if not token_ids:
            raise ConfigError(f"{source.where}: the prompt has no tokens; correct or remove the line")
        prompts.append(token_ids)
    return prompts, tokenizer.eos_token_ids


class StopRequest:
    """Notes that Ctrl-C or SIGTERM arrived. While training, the running step ends and is saved. Elsewhere, and for a second
    signal, the command ends at once."""

    def __init__(self) -> None:
        self.is_asked = False
        self.is_training = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked or not self.is_training:
            raise KeyboardInterrupt
        self.is_asked = True


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    stop = StopRequest()
    old = {number: signal.signal(number, stop.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def progress_display() -> Iterator[Callable[[str, int, int, TrainState | None], None]]:
    """Yield a function that shows progress: on a terminal as a bar, elsewhere as lines."""
    if not sys.stderr.isatty():
        yield _line_display()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    left = (TimeRemainingColumn(), TextColumn("left"))
    with Progress(*columns, *left, console=Console(stderr=True), speed_estimate_period=120.0) as bars:
        tasks: dict[str, TaskID] = {}
        rate = _StageRate()

        def show(stage: str, done: int, total: int, state: TrainState | None) -> None:
            if stage not in tasks:
                # A continued training starts in the middle, which is no progress of this run.
                tasks[stage] = bars.add_task(stage, total=total, completed=done, note="")
            bars.update(tasks[stage], total=total, completed=done, note=_note(state, rate.value(stage, done)))

        yield show


def _line_display() -> Callable[[str, int, int, TrainState | None], None]:
    last_stage, next_s, rate = "", 0.0, _StageRate()

    def show(stage: str, done: int, total: int, state: TrainState | None) -> None:
        nonlocal last_stage, next_s
        per_s = rate.value(stage, done)
        if stage == last_stage and done < total and time.monotonic() < next_s:
            return
        last_stage, next_s = stage, time.monotonic() + _LINE_EVERY_S
        left = f"  about {(total - done) / per_s / 60:.1f} min left" if per_s and done < total else ""
        print_message(f"{stage} {done}/{total}  {_note(state, per_s)}{left}".rstrip(), sys.stderr)

    return show


class _StageRate:
    """The mean rate of the current stage in this run."""

    def __init__(self) -> None:
        self._stage, self._first, self._started_s = "", 0, 0.0

    def value(self, stage: str, done: int) -> float:
        now_s = time.monotonic()
        if stage != self._stage:
            self._stage, self._first, self._started_s = stage, done, now_s
        return (done - self._first) / (now_s - self._started_s) if done > self._first else 0.0


def _note(state: TrainState | None, per_s: float) -> str:
    parts = [f"{per_s:.3g}/s"] if per_s else []
    if state is not None and state.acceptance:
        parts.append(f"loss {state.loss:.3f}  acceptance {100 * state.acceptance[0]:.0f}%")
        parts.append(f"{state.tokens_per_step:.2f} tokens/step")
    return "  ".join(parts)


def _summary(report: dict[str, Any], out: Path) -> str:
    lines = [
        f"Trained on {report['answer_tokens']} tokens of {report['prompts']} answers, {report['steps']} steps. "
        f"The draft vocabulary of {report['draft_vocab']} tokens covers {100 * report['draft_vocab_coverage']:.1f}%."
    ]
    for name, found in report["evaluation"].items():
        rates = ", ".join(f"{100 * rate:.0f}%" for rate in found["acceptance_at"])
        lines.append(f"Held-out prompts, {name}: {found['tokens_per_step']:.2f} tokens per step (accepted: {rates}).")
    return "\n".join([*lines, f"The head is in {out}. Serve it: stoker serve MODEL --drafter eagle3:{out}"])
