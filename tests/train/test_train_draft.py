"""Training a head: it is accepted more often than an untrained one, a resumed training gives the same bits, and bad input
is refused."""

from __future__ import annotations

import json
import random
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import make_tiny

from stoker.base import garbage
from stoker.base.errors import ConfigError
from stoker.engine import llm
from stoker.engine.build import build_engine
from stoker.train import train_draft as train_module
from stoker.train import work_folder
from stoker.train.answers import read_answers
from stoker.train.train_draft import TrainInterrupted, TrainJob, train_draft
from stoker.train.train_loop import TrainingDiverged, TrainState, learning_rate, plan_batches
from stoker.train.train_settings import TrainSettings
from stoker.train.work_folder import WorkFolder, WorkFolderError, require_space, write_file

RNG = random.Random(0)
DISTINCT = [[RNG.randrange(199) for _ in range(RNG.randrange(3, 12))] for _ in range(3)]
PROMPTS = DISTINCT * 8  # the held-out prompts are some of these: the text can be memorised
QUICK = TrainSettings(
    device="cpu", dtype="float64", num_threads=1, answer_tokens=16, prompt_tokens=40, draft_vocab=60, epochs=2, unroll=2,
    batch_tokens=128, sampled_share=0.3, temperature=0.5, checkpoint_s=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder, "llama", torch.float64)
    return folder


def silent(stage: str, done: int, total: int, state: TrainState | None = None) -> None:
    pass


class Run(NamedTuple):
    model: Path
    folder: Path

    def job(self, **changes: Any) -> TrainJob:
        return replace(TrainJob(self.model, PROMPTS, (), self.folder / "work", self.folder / "out"), **changes)

    def train(self, settings: TrainSettings = QUICK, stop_after: int = 1 << 30, **changes: Any) -> dict[str, Any]:
        """Train. `stop_after`: ask for an end in this step."""
        steps = 0

        def should_stop() -> bool:
            nonlocal steps
            steps += 1
            return steps >= stop_after

        return train_draft(self.job(**changes), settings, silent, should_stop)

    def files(self) -> dict[str, bytes]:
        names = ("work/checkpoint.safetensors", "out/model.safetensors", "out/config.json")
        return {name: (self.folder / name).read_bytes() for name in names}


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Run:
    return Run(model, tmp_path)


def test_a_trained_head_is_accepted_much_more_often_than_an_untrained_one(run: Run, tmp_path: Path) -> None:
    settings = replace(QUICK, answer_tokens=24, unroll=3, epochs=24, learning_rate=4e-3, sampled_share=0.0,
                       temperature=0.0, checkpoint_s=60.0, batch_tokens=256)  # fmt: skip
    trained = run.train(settings, prompts=DISTINCT * 14)
    (tmp_path / "work" / "checkpoint.safetensors").unlink()
    untrained = run.train(replace(settings, learning_rate=1e-12, epochs=1), prompts=DISTINCT * 14)
    before, after = (report["evaluation"]["greedy"] for report in (untrained, trained))
    print(before, after)
    assert before["drafted_at"][0] > 70, "drafts that are wrong are verified too"
    assert after["acceptance_at"][0] > 0.5
    assert after["tokens_per_step"] > before["tokens_per_step"] + 0.6
    assert trained["history"][-1][1] < trained["history"][0][1], "the loss falls"
    report = json.loads((tmp_path / "out" / "train_report.json").read_text())
    assert report["settings"]["learning_rate"] == 1e-12, "the second head replaced the first one"
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "train_report.json",
    ]
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")], "no temporary folder is left"


def test_a_resumed_training_gives_the_same_bits(model: Path, tmp_path: Path) -> None:
    whole, parts = Run(model, tmp_path / "whole"), Run(model, tmp_path / "parts")
    report = whole.train()
    stopped = 0
    for stop_after in (1, 4):
        with pytest.raises(TrainInterrupted):
            parts.train(stop_after=stop_after)
        stopped += stop_after
    assert stopped < report["steps"]
    assert not (tmp_path / "parts" / "out").exists()
    resumed = parts.train()
    assert parts.files() == whole.files()
    assert resumed["evaluation"]["sampled"]["generated_tokens"] > 0
    again = parts.train()  # nothing is left to train
    assert parts.files() == whole.files()
    assert (again["steps"], again["history"]) == (report["steps"], report["history"])


def test_answers_are_generated_once_and_missing_files_again(run: Run) -> None:
    with pytest.raises(TrainInterrupted):
        run.train(stop_after=1, prompts=DISTINCT * 30)  # 81 to train on: three files
    store = run.folder / "work" / "answers"
    files = {file: file.stat().st_mtime_ns for file in store.iterdir()}
    assert len(files) == 3
    answers = read_answers(store, 81, 32, 199)
    lost = sorted(files)[1]
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(TrainInterrupted):
        run.train(stop_after=1, prompts=DISTINCT * 30)
    assert lost.read_bytes() == content
    assert all(file.stat().st_mtime_ns == made for file, made in files.items() if file != lost)
    assert read_answers(store, 81, 32, 199) == answers
    lost.write_bytes(content[:-20])
    with pytest.raises(WorkFolderError, match=f"{lost.name} cannot be read"):
        run.train(prompts=DISTINCT * 30)


def test_a_work_folder_of_other_settings_is_refused_by_the_field(run: Run, tmp_path: Path) -> None:
    with pytest.raises(TrainInterrupted):
        run.train(stop_after=1)
    before = (tmp_path / "work" / "checkpoint.safetensors").read_bytes()
    other = tmp_path / "other"
    make_tiny(other, "llama", torch.float64, intermediate_size=104)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("model=", lambda: run.train(model=other)),
        ("data=", lambda: run.train(prompts=PROMPTS[:-3])),
        ("data=", lambda: run.train(replace(QUICK, max_prompts=20))),
        ("temperature=0.5, and now it is 0.7", lambda: run.train(replace(QUICK, temperature=0.7))),
        ("seed=0, and now it is 1", lambda: run.train(replace(QUICK, seed=1))),
        ("dtype='float64', and now it is 'float32'", lambda: run.train(replace(QUICK, dtype="float32"))),
        ("stop_token_ids=", lambda: run.train(stop_token_ids=(5,))),
        ("the checkpoint .*epochs=2, and now it is 3", lambda: run.train(replace(QUICK, epochs=3))),
        ("the checkpoint .*draft_vocab=60, and now it is 61", lambda: run.train(replace(QUICK, draft_vocab=61))),
    ]
    for message, attempt in cases:
        with pytest.raises(ConfigError, match=message):
            attempt()
    assert (tmp_path / "work" / "checkpoint.safetensors").read_bytes() == before
    with pytest.raises(TrainInterrupted):
        run.train(replace(QUICK, checkpoint_s=1.0), stop_after=1)  # changes no bit


def test_a_damaged_work_folder_is_refused_by_the_file(run: Run, tmp_path: Path) -> None:
    with pytest.raises(TrainInterrupted):
        run.train(stop_after=1)
    checkpoint = tmp_path / "work" / "checkpoint.safetensors"
    content = checkpoint.read_bytes()
    for damaged in (b"", content[:100], content[:-1], content.replace(b'"stoker"', b'"stokes"')):
        checkpoint.write_bytes(damaged)
        with pytest.raises(WorkFolderError, match=r"checkpoint\.safetensors is damaged"):
            run.train()
    (tmp_path / "work" / "identity.json").write_text("[")
    with pytest.raises(ConfigError, match=r"identity\.json is damaged"):
        run.train()


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    (tmp_path / "answers").mkdir()
    left = [".checkpoint.safetensors.a1", ".identity.json.b2", "answers/.00000032.safetensors.c3"]
    kept = ["checkpoint.safetensors", "identity.json", "answers/00000032.safetensors", ".mine"]
    for name in (*left, *kept):
        (tmp_path / name).write_text("x")
    with WorkFolder(tmp_path).locked():
        assert [name for name in (*left, *kept) if (tmp_path / name).exists()] == kept


def test_two_trainings_do_not_share_a_work_folder(run: Run, tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "work").locked(), pytest.raises(ConfigError, match="used by another process"):
        run.train()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        run.train(work=tmp_path / "file" / "work")


BAD_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "vocabulary": ({"draft_vocab": 200}, {}, "--draft-vocab 200 is more than the model's vocabulary of 199"),
    "no prompts": ({}, {"prompts": []}, "0 of 0 prompts"),
    "one prompt": ({}, {"prompts": [[1, 2]]}, "1 of 1 prompts .* at least 2 are needed"),
    "long prompts": ({"prompt_tokens": 2}, {}, "0 of 24 prompts have 1 to 2 tokens"),
    "empty prompts": ({}, {"prompts": [[], [], [3]]}, "1 of 3 prompts have 1 to 40"),
    "context": ({"answer_tokens": 500}, {}, "are 540 tokens, and the model's context has 512"),
    "token": ({}, {"prompts": [[1], [199]]}, "token 199 of a prompt is not in the model's vocabulary of 199"),
    "device": ({"device": "tpu"}, {}, "device='tpu': must be cpu"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings_are_refused_before_anything_is_written(name: str, run: Run) -> None:
    settings, job, message = BAD_SETTINGS[name]
    with pytest.raises(ConfigError, match=message):
        run.train(replace(QUICK, **settings), **job)
    assert list(run.folder.iterdir()) == []


def test_an_answer_that_ends_at_once_gives_nothing_to_learn(run: Run) -> None:
    with pytest.raises(ConfigError, match="no answer of 2 tokens"):
        run.train(stop_token_ids=tuple(range(199)))


def test_a_folder_that_is_no_head_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is no trained head"):
        run.train()
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_too_little_disk_space_is_refused_with_the_numbers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(ConfigError, match=rf"needs {(free + 10**12) / 1e6:.0f} MB .* MB are free"):
        require_space(tmp_path / "not" / "there", free + 10**12)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(work_folder.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(ConfigError, match="needs 2 MB of disk space, and 0 MB are free"):
        run.train()


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_file(tmp_path / "file", b"old")
    with pytest.raises(WorkFolderError, match="below cannot be written: File exists; 3 bytes"):
        write_file(tmp_path / "file" / "below", b"new")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(WorkFolderError, match="cannot be written"):
        write_file(tmp_path / "folder", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder"]


def test_a_loss_that_is_not_finite_ends_the_training(run: Run) -> None:
    with pytest.raises(TrainInterrupted):
        run.train(stop_after=1)
    checkpoint = run.folder / "work" / "checkpoint.safetensors"
    with safe_open(checkpoint, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        metadata = file.metadata()
    tensors["head.fc.weight"][3, 4] = float("inf")
    save_file(tensors, checkpoint, metadata)
    with pytest.raises(TrainingDiverged, match=r"step 1: the loss is nan .* lower --learning-rate"):
        run.train()


def test_the_engines_of_a_training_are_freed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the next engine needs the memory of the last one. Engines exempt themselves from garbage collection."""
    built: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(*args: Any, **options: Any) -> Any:
        alive.append(sum(one() is not None for one in built))
        made = build_engine(*args, **options)
        garbage.freeze()  # as an engine on a GPU does it
        built.append(weakref.ref(made.model))
        return made

    monkeypatch.setattr(llm, "build_engine", watched)
    monkeypatch.setattr(train_module, "build_engine", watched)
    run.train(replace(QUICK, epochs=1))
    assert alive == [0, 0, 0], "answers, training, evaluation"


def test_an_epoch_has_each_answer_once_in_batches_of_bounded_size() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        lengths = [rng.randrange(2, 90) for _ in range(rng.randrange(1, 200))]
        sizes = set()
        for epoch in range(3):
            batches = plan_batches(lengths, 100, seed, epoch)
            assert sorted(number for batch in batches for number in batch) == list(range(len(lengths))), f"seed {seed}"
            assert all(len(one) == 1 or len(one) * max(lengths[n] for n in one) <= 100 for one in batches)
            sizes.add(len(batches))
        assert len(sizes) == 1, f"seed {seed}"


def test_the_learning_rate_rises_and_falls() -> None:
    settings = TrainSettings(learning_rate=1.0, warmup_steps=10)
    rates = [learning_rate(step, 200, settings) for step in range(200)]
    assert rates[:10] == [pytest.approx(0.1 * (number + 1)) for number in range(10)]
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.025, abs=0.001)
    assert learning_rate(0, 3, settings) == 1.0, "a warm-up is at most a tenth of the training"
