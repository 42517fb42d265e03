"""Calibrations: the fit, an engine measured in this process, and estimates for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import make_tiny

from stoker import __version__
from stoker.base.errors import ConfigError
from stoker.cli.main import main
from stoker.loadgen.draft_probe import DraftRates, draft_rates
from stoker.sched.step_work import StepWork
from stoker.sim.calibration import StepModel, read_calibration
from stoker.sim.fit import MeasuredStep, fit

TRUE = StepModel([1, 8, 64, 512], [0.010, 0.012, 0.05, 0.4], 1e-4, 2e-6, 5e-8)


def steps(noise: float = 0.0) -> list[MeasuredStep]:
    works = [StepWork(rows, rows, rows * context, 0.0, context) for rows in (1, 2, 4, 8) for context in (10, 500, 2000)]
    works += [
        StepWork(size, 1, 0, size * (before + size / 2), before + size)
        for size in (16, 64, 200, 512)
        for before in (0, 1000)
    ]
    found = []
    for number, work in enumerate(works):
        seconds = TRUE.seconds(work.tokens, work.rows, work.context_tokens, work.attended_pairs)
        found.append(MeasuredStep(work, seconds * (1 + noise * (number % 7 == 3)), held_out=number % 5 == 4))
    return found


def test_a_fit_recovers_the_model_that_made_the_times() -> None:
    model, bounds, residuals = fit(steps(), max_rows=64)
    assert residuals.p90 < 0.02
    assert model.seconds(300, 1, 0, 300 * 800) == pytest.approx(TRUE.seconds(300, 1, 0, 300 * 800), rel=0.05)
    assert (bounds.rows, bounds.step_tokens, bounds.context_tokens) == (8, 512, 2000)
    assert any(one.held_out for one in residuals.samples)


def test_steps_that_a_busy_machine_delayed_hardly_change_the_fit() -> None:
    model, _, residuals = fit(steps(noise=3.0), max_rows=64)
    assert model.seconds(4, 4, 2000, 0) == pytest.approx(TRUE.seconds(4, 4, 2000, 0), rel=0.1)
    assert residuals.p90 > 0.5  # and the residuals tell


def test_a_step_of_more_tokens_is_never_predicted_to_be_faster() -> None:
    """Measured on two busy cores. Decoding rows and prompts have different sizes, so the fit must not divide their time freely."""
    decoding = {1: (12.9, 15.5, 17.5), 2: (14.8, 19.2, 23.1), 4: (17.2, 22.2, 28.3), 8: (21.1, 28.8, 38.9)}
    prompts = {16: 22.2, 32: 34.1, 64: 57.1, 128: 118.6, 256: 258.8, 512: 575.7}
    measured = [
        MeasuredStep(StepWork(rows, rows, rows * context, 0.0, context), ms / 1e3)
        for rows, times in decoding.items()
        for context, ms in zip((76, 524, 1036), times, strict=True)
    ]
    measured += [MeasuredStep(StepWork(n, 1, 0, n * (n + 1) / 2, n), ms / 1e3) for n, ms in prompts.items()]
    model, _, residuals = fit(measured, max_rows=64)
    assert sorted(model.knot_s) == model.knot_s
    assert residuals.median < 0.06
    assert model.seconds(16, 16, 16 * 230, 0.0) == pytest.approx(0.036, rel=0.15), "what a loaded worker needed"


def test_too_few_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few for a fit"):
        fit(steps()[:2], max_rows=64)


def test_an_engine_is_measured_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny(tmp_path / "tiny", "llama")
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    output = tmp_path / "tiny.json"
    flags = ["--kv-blocks", "64", "--step-tokens", "64", "--max-rows", "4", "--threads", "1", "--repeats", "1"]
    assert main(["calibrate", str(tmp_path / "tiny"), "--output", str(output), *flags]) == 0
    found = read_calibration(output, __version__, "tiny")
    assert (found.kind, found.device, found.shape.kv_blocks, found.shape.max_rows) == ("measured", "cpu", 64, 4)
    assert found.bounds.rows == 4
    assert len(found.residuals.samples) > 5
    assert "MEASURED MS" in capsys.readouterr().out


def test_a_gpu_is_estimated_and_the_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny(tmp_path / "tiny", "llama")
    times = {}
    for gpu in ("H100", "H200", "B200"):
        output = tmp_path / f"{gpu}.json"
        assert (
            main(["calibrate", str(tmp_path / "tiny" / "config.json"), "--gpu", f"1x{gpu}", "--output", str(output)])
            == 0
        )
        found = read_calibration(output, __version__)
        assert found.kind == "estimate"
        times[gpu] = found.step.curve_s(8192)
    assert times["B200"] < times["H200"] <= times["H100"]
    assert main(["sim", "--calibration", str(output), "--num-requests", "5"]) == 0
    assert "closed-form estimates and not measurements" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ((), "--output FILE"),
        (("--output", "/absent/x.json"), "there is no folder /absent"),
        (("--output", "x.json", "--gpu", "1xH100", "--url", "http://127.0.0.1:1"), "give only one"),
        (("--output", "x.json", "--gateway", "http://127.0.0.1:1"), "--gateway has no effect"),
        (("--output", "x.json", "--repeats", "0"), "--repeats 0"),
        (
            ("--output", "x.json", "--gpu", "1xH100", "--drafts-from", "http://127.0.0.1:1"),
            "--drafts-from has no effect",
        ),
    ],
)
def test_wrong_calibration_options_are_named(
    argv: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *argv]) == 2
    assert problem in capsys.readouterr().err


def test_tiers_are_measured_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny(tmp_path / "tiny", "llama")
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    (tmp_path / "disk").mkdir()
    output = tmp_path / "tiny.json"
    flags = ["--kv-blocks", "64", "--step-tokens", "64", "--max-rows", "2", "--threads", "1", "--repeats", "1"]
    tiers = ["--kv-host-gib", "0.01", "--kv-disk", str(tmp_path / "disk"), "--kv-disk-gib", "0.01"]
    assert main(["calibrate", str(tmp_path / "tiny"), "--output", str(output), *flags, *tiers]) == 0
    found = read_calibration(output, __version__)
    assert set(found.tiers) == {"host", "disk"}
    assert all(1e5 < tier.bytes_per_s < 1e13 and tier.latency_s < 1.0 for tier in found.tiers.values())
    assert "tier disk" in capsys.readouterr().out
    assert main(["sim", "--calibration", str(output), "--num-requests", "5", "--disk-gib", "0.1", "--no-range"]) == 0


def metrics(tokens: int, drafted: int, accepted: int) -> str:
    lines = ["# HELP stoker_output_tokens_total Generated tokens by kind of output"]
    for name, count in (("tokens", tokens), ("draft_tokens", drafted), ("accepted_draft_tokens", accepted)):
        lines += [f'stoker_output_{name}_total{{kind="{kind}"}} {count / 2}' for kind in ("prose", "json")]
    return "\n".join([*lines, 'stoker_output_tokens_created{kind="prose"} 1.7e9', ""])


@pytest.mark.parametrize("drafts", [1, 4])
def test_drafts_come_from_a_workers_traffic(drafts: int) -> None:
    """1,000 steps of a row verify `drafts` drafts each, of which 70% are right if those before them are."""
    accepted = round(1000 * sum(0.7**i for i in range(1, drafts + 1)))
    found = draft_rates(metrics(1000 + accepted, 1000 * drafts, accepted), "http://w")
    assert found.drafts == drafts
    assert found.acceptance == pytest.approx(0.7, abs=0.01)


def test_a_worker_without_drafts_or_without_traffic() -> None:
    assert draft_rates(metrics(1000, 0, 0), "http://w") == DraftRates(0, 0.0)
    with pytest.raises(ConfigError, match="--drafts-from http://w: the worker has generated 20 tokens"):
        draft_rates(metrics(20, 8, 4), "http://w")


def test_a_worker_that_does_not_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["calibrate", "--output", str(tmp_path / "x.json"), "--drafts-from", "http://127.0.0.1:1"]
    assert main(argv) != 0
    assert "--drafts-from http://127.0.0.1:1" in capsys.readouterr().err
