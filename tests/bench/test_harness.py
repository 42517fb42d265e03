"""The benchmark runner: every benchmark is found, answers --help without extra packages, and the report is current."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench import contract, plots, report, results
from bench.__main__ import main
from bench.contract import BenchmarkError, Result
from bench.faults import kill_matrix
from bench.support import attack_corpus, data_folder, routers
from bench.support.processes import free_port, python_module, started, wait_for_port
from bench.support.router_client import closed_loop, latency_ms

ROOT = Path(__file__).parents[2]
BENCHMARKS = [(group, name) for group, names in contract.names_by_group().items() for name in names]
# Everything that is not in the standard library, in an interpreter that has none of it.
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first not in sys.stdlib_module_names and first not in ("bench", "stoker"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""


def in_plain_interpreter(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", BLOCKED + f"sys.path.insert(0, {str(ROOT)!r})\n" + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_all_benchmarks_are_listed_without_extra_packages():
    listed = in_plain_interpreter("from bench.__main__ import main\nsys.exit(main([]))")
    assert listed.returncode == 0, listed.stderr
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("  ")]
    assert names == [name for _, name in BENCHMARKS]
    assert len(names) >= 27


def test_every_benchmark_answers_help_without_extra_packages():
    code = f"""
import contextlib, io
from bench.__main__ import main
for name in {[name for _, name in BENCHMARKS]!r}:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main(["run", name, "--help"])
    assert "Needs: " in shown.getvalue() and "--save" in shown.getvalue(), name
for argv in (["--help"], ["run"], ["make-model", "--help"]):
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main(argv)
    assert shown.getvalue(), argv
"""
    ended = in_plain_interpreter(code)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("group", "name"), BENCHMARKS)
def test_a_benchmark_keeps_the_contract(group: str, name: str):
    benchmark = contract.load(group, name)
    assert benchmark.help
    assert "\n" not in benchmark.help
    assert not benchmark.help.endswith(".")
    assert benchmark.description.strip()


def test_names_are_unique():
    names = [name for _, name in BENCHMARKS]
    assert len(set(names)) == len(names)


def test_saved_results_belong_to_benchmarks_and_have_right_ratios():
    known = {name for _, name in BENCHMARKS}
    for name, records in results.read_all().items():
        assert name in known
        assert len({record.key for record in records}) == len(records)
        for record in records:
            assert record.benchmark == name
            result = Result(
                record.case, record.metric, record.unit, record.value, record.better,
                record.competitor, record.competitor_value, record.comparison,
            )  # fmt: skip
            assert record.ratio == (None if result.ratio is None else pytest.approx(result.ratio, abs=1e-4))


def test_the_report_is_generated_from_the_results():
    assert report.PATH.read_text(encoding="utf-8") == report.markdown(results.read_all()), (
        "run `python -m bench report`"
    )


@pytest.mark.parametrize("name", plots.PLOTS)
def test_the_plots_are_generated_from_the_results(name: str):
    saved = (plots.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert saved == plots.PLOTS[name](results.read_all()), "run `python -m bench report`"


def test_tables_have_at_most_six_columns_and_one_number_per_cell():
    for line in report.PATH.read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            cells = line.strip("| ").split(" | ")
            assert len(cells) <= 6, line


def test_the_report_lists_where_a_competitor_is_ahead():
    record = results.to_record(
        "soak", Result("a case", "latency", "ms", 20.0, "lower", "Other 1.0", 10.0), "m", "d", "c"
    )
    baseline = results.to_record(
        "soak", Result("b case", "latency", "ms", 20.0, "lower", "memcpy", 10.0, "baseline"), "m", "d", "c"
    )
    behind = report._behind([record, baseline])
    assert "a case, latency: 20 ms against 10 of Other 1.0 (0.50x)" in behind
    assert "b case" not in behind


def test_saving_replaces_a_result_of_the_same_case_and_keeps_the_others(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    first, second = Result("one", "speed", "x", 1.0), Result("two", "speed", "x", 2.0)
    results.save("soak", [first, second], "m", "c")
    path = results.save("soak", [Result("one", "speed", "x", 3.0)], "m", "c")
    assert [(record.case, record.value) for record in results.read(path)] == [("one", 3.0), ("two", 2.0)]
    assert {row["command"] for row in json.loads(path.read_text())} == {"c"}


def test_results_of_another_machine_are_merged_without_touching_the_others(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    results.save("soak", [Result("one", "speed", "x", 1.0), Result("two", "speed", "x", 2.0)], "m", "c")
    away = results.save("soak", [Result("two", "speed", "x", 5.0)], "GPU", "c", tmp_path / "away")
    assert len(results.read(away)) == 1
    assert main(["merge", str(away)]) == 0
    merged = results.read(results.path_of("soak"))
    assert [(record.case, record.value, record.machine) for record in merged] == [
        ("one", 1.0, "m"),
        ("two", 5.0, "GPU"),
    ]
    (tmp_path / "bad.json").write_text('[{"case": "one"}]')
    foreign = results.save("../x", [Result("two", "speed", "x", 5.0)], "GPU", "c", tmp_path / "away")
    for path, problem in ((tmp_path / "bad.json", "not a file of results"), (foreign, "there is no benchmark '../x'")):
        assert main(["merge", str(path)]) == 2
        assert problem in capsys.readouterr().err


def test_the_case_that_misses_its_targets_by_most_comes_first():
    def record(case: str, metric: str, value: float, target: float | None) -> results.SavedRecord:
        result = Result(case, metric, "ms", value, "lower", "Other 1.0", 10.0, target=target)
        return results.to_record("soak", result, "m", "d", "c")

    records = [record("good", "a", 5.0, 1.5), record("bad", "a", 8.0, 1.5), record("bad", "b", 5.0, 1.5)]
    [targets] = report._targets([*records, record("none", "a", 20.0, None)])
    rows = targets.splitlines()[4:]
    assert rows == [
        "| `soak` | bad | 1 of 2 | a | 1.25x | ≥ 1.50x |",
        "| `soak` | good | 1 of 1 | a | 2.00x | ≥ 1.50x |",
    ]
    section = report._section("faults", "soak", records)
    assert section.index("bad: a") < section.index("good: a")
    assert "| bad: a | ms | 8 | 10 | 1.25x | ≥ 1.50x |" in section


def test_ratios_tell_how_many_times_better_stoker_is():
    assert Result("c", "m", "ms", 10.0, "lower", "x", 20.0).ratio == 2.0
    assert Result("c", "m", "tokens/s", 10.0, "higher", "x", 20.0).ratio == 0.5
    assert Result("c", "m", "ms", 10.0).ratio is None


def test_missing_data_is_named(tmp_path: Path, capsys):
    assert main(["run", "trace_replay", "--data", str(tmp_path / "absent")]) == 2
    assert f"there is no data folder at {tmp_path / 'absent'}; name it with --data DIR" in capsys.readouterr().err
    with pytest.raises(BenchmarkError, match="has no traces/x"):
        data_folder.find(tmp_path, ["traces/x"])


def test_a_file_that_cannot_take_the_results_is_refused_before_the_run(tmp_path: Path, capsys):
    argv = ["run", "placement_simulation", "--save-to", str(tmp_path)]
    path = tmp_path / "placement_simulation.json"
    assert main([*argv, "--details", str(path)]) == 2
    assert "choose another name" in capsys.readouterr().err
    path.write_text('{"not": "results"}')
    assert main(argv) == 2
    assert "not a file of results" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "absent.json")]) == 2


def test_an_unknown_benchmark_is_named(capsys):
    assert main(["run", "absent"]) == 2
    assert "there is no benchmark 'absent'" in capsys.readouterr().err


def test_a_run_prints_its_results_and_writes_details(tmp_path: Path, capsys):
    details = tmp_path / "details.json"
    argv = ["--cases", "A3", "--seeds", "7", "--session", "with", "--details", str(details)]
    assert main(["run", "placement_simulation", *argv]) == 0
    assert "A3, with session key, 1 seeds, hit ratio, mean: 0.97" in capsys.readouterr().out
    assert json.loads(details.read_text())[0]["seed"] == 7


def test_router_commands_are_filled_in(tmp_path: Path):
    urls = ["http://a:1", "http://b:2"]
    filled = routers.fill("x --port {port} {workers:--worker,dialect=openai} {policy}", 5, urls, tmp_path, "--policy p")
    assert filled == ["x", "--port", "5", "--worker", "http://a:1,dialect=openai", "--worker", "http://b:2,dialect=openai",
                      "--policy", "p"]  # fmt: skip
    assert routers.fill("y --worker-urls {workers}", 5, urls, tmp_path) == ["y", "--worker-urls", *urls]
    command = routers.fill(routers.COMMANDS["litellm"], 5, urls, tmp_path)
    assert command[0] == "env"
    assert (tmp_path / "litellm.yaml").exists()
    with pytest.raises(BenchmarkError, match="no command is known"):
        routers.parse(["unknown"])


def test_the_mock_worker_answers_whole_and_streamed_chats(tmp_path: Path):
    port = free_port()
    with started(python_module("bench.support.mock_worker", port, "--chunks", 4), tmp_path / "log"):
        wait_for_port(port)
        full, streamed = (closed_loop(port, 2, 0.3, mode) for mode in ("full", "stream"))
        p50_ms, p99_ms = latency_ms(port, 2, 10, "mock")
    assert full["requests"] > 10
    assert streamed["chunks"] >= 5 * streamed["requests"] > 10
    assert full["failed"] == streamed["failed"] == 0
    assert 0 < p50_ms <= p99_ms


def test_attacks_are_measured_and_the_controls_are_clean(tmp_path: Path, capsys):
    details = tmp_path / "details.json"
    argv = ["--quiet-s", "0.5", "--seconds", "1", "--attack", "chats with wrong keys"]
    main(["run", "attacks", *argv, "--log-dir", str(tmp_path), "--details", str(details)])
    assert "chats with wrong keys, /health p99: " in capsys.readouterr().out
    measured = {one["attack"]: one for one in json.loads(details.read_text())}
    assert len(measured) == 3
    assert measured["control: no attack"]["answered"] == measured["control: no attack"]["total"] > 5
    assert measured["control: attack on a null sink"]["attacker"]["bytes sent"] > 100_000
    assert measured["chats with wrong keys"]["attacker"]["status 401"] > 10


@pytest.mark.parametrize("name", attack_corpus.ATTACKS)
def test_an_attack_sends_something_or_waits_on_purpose(name: str):
    attack = attack_corpus.ATTACKS[name]
    first = next(attack.script(random.Random(0), "sk-x" if attack.key else ""))
    assert isinstance(first, float) == (attack.script is attack_corpus.silent_connection)
    if isinstance(first, bytes) and attack.key:
        assert b"Authorization: Bearer sk-x" in first


@pytest.mark.slow
def test_answers_and_ledger_survive_a_short_storm(capsys):
    assert main(["run", "kill_storm", "--kills", "6", "--clients", "4", "--bodies", "12"]) == 0, capsys.readouterr()


def test_the_fault_tests_exist():
    assert all((ROOT / "tests" / "gateway" / name).is_file() for name in kill_matrix.TESTS)
