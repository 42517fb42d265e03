"""Data sets by name: each gives a list of sessions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from stoker.base.errors import ConfigError
from stoker.loadgen import prompts, traces
from stoker.loadgen.session import LoadSession, TokenRange, Turn, first_requests

DATA_DIRS = (Path("data"), Path("../shared/data"))
GENERATED = ("random", "trace")  # generated prompts; they set their own output lengths
_UNFIT = (KeyError, TypeError, AttributeError, ValueError)  # a field is missing or has another type


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    name: str
    num_requests: int | None = 100  # None: all
    data_dir: Path | None = None
    file: Path | None = None  # for sharegpt and trace
    max_turns: int | None = None
    max_tokens: int | None = None
    flatten_tools: bool = False
    input_tokens: int = 512
    output_tokens: int = 128
    range_ratio: float = 0.0
    vocab_size: int | None = None
    replay: traces.Replay = field(default_factory=traces.Replay)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio <= 1:
            raise ConfigError(f"--range-ratio {self.range_ratio:g}: must be from 0 to 1")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"--num-requests {self.num_requests}: must be above 0")


def load_dataset(spec: DatasetSpec) -> list[LoadSession]:
    """Return sessions with at most `num_requests` requests. Recorded conversations are shuffled by the seed."""
    sessions = _LOADERS[spec.name](spec)
    if spec.name not in GENERATED:
        random.Random(spec.seed).shuffle(sessions)
    chosen = first_requests(sessions, spec.num_requests, spec.max_turns)
    sessions = [replace(session, turns=_limited(session.turns, spec.max_tokens)) for session in chosen]
    if not sessions:
        raise ConfigError(f"the data set {spec.name} has no requests")
    return sessions


def num_turns(sessions: Sequence[LoadSession]) -> int:
    return sum(len(session.turns) for session in sessions)


def _limited(turns: Sequence[Turn], max_tokens: int | None) -> Sequence[Turn]:
    if max_tokens is None:
        return turns
    return [replace(turn, max_tokens=min(turn.max_tokens or max_tokens, max_tokens)) for turn in turns]


def _random(spec: DatasetSpec) -> list[LoadSession]:
    shape = (spec.num_requests or 1, spec.input_tokens, spec.output_tokens, spec.range_ratio, spec.seed)
    if spec.vocab_size is None:
        return prompts.random_words(*shape)
    return prompts.random_tokens(*shape, TokenRange.below(spec.vocab_size))


def _sharegpt(spec: DatasetSpec) -> list[LoadSession]:
    file = _file(spec, "--dataset-file")
    with _shaped(file, "conversations in ShareGPT's format"):
        return prompts.sharegpt_set(file)


def _trace(spec: DatasetSpec) -> list[LoadSession]:
    file = _file(spec, "--trace")
    with _shaped(file, "a trace in Mooncake's format or of agent sessions"):
        return traces.trace_sessions(file, spec.replay)


@contextmanager
def _shaped(file: Path, shape: str) -> Iterator[None]:
    """Report an error while a user's file is parsed as a problem of that file."""
    try:
        yield
    except _UNFIT as wrong:
        raise ConfigError(f"{file}: not {shape}: {type(wrong).__name__}: {wrong}") from wrong


def _prompts(spec: DatasetSpec) -> list[LoadSession]:
    return prompts.prompt_set(_data_dir(spec) / prompts.PROMPT_FILES[spec.name])


def _conversations(spec: DatasetSpec) -> list[LoadSession]:
    folder = _data_dir(spec)
    path = folder / prompts.CONVERSATION_FILES[spec.name]
    return prompts.conversation_set(path, folder / prompts.TOOLS_FILE, spec.flatten_tools)


def _file(spec: DatasetSpec, option: str) -> Path:
    if spec.file is None:
        raise ConfigError(f"the data set {spec.name} needs {option} FILE")
    return spec.file


def _data_dir(spec: DatasetSpec) -> Path:
    folders = DATA_DIRS if spec.data_dir is None else (spec.data_dir,)
    for folder in folders:
        if folder.is_dir():
            return folder
    raise ConfigError(f"there is no data folder at {' or '.join(map(str, folders))}; name it with --data-dir")


_LOADERS: dict[str, Callable[[DatasetSpec], list[LoadSession]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    **dict.fromkeys(prompts.PROMPT_FILES, _prompts),
    **dict.fromkeys(prompts.CONVERSATION_FILES, _conversations),
    "trace": _trace,
}
DATASETS = tuple(_LOADERS)
