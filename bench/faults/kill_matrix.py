"""The fault tests with real processes: every worker or engine killed with SIGKILL at every stage of every kind of request.

Runs the tests below tests/gateway with pytest, the slow ones included (about 30 minutes on two cores), and counts
them. Gateway, workers and a tiny model in float64 are real. Every answer must equal the undisturbed one, or be a clean
error where no worker is left; reservations must return to zero within 5 s.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench.contract import ROOT, Needs, Report, Result
from bench.support.processes import environment

NAME = "kill_matrix"
HELP = "the tests that kill workers and engines at every stage of a request, slow ones included"
NEEDS = Needs(packages=("pytest", "torch", "aiohttp", "msgspec"), programs="vllm-router on PATH for two of the tests")
TESTS = (
    "test_real_kill.py",
    "test_real_pd_faults.py",
    "test_real_pd.py",
    "test_real_fleet.py",
    "path/test_vllm_router.py",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--select", metavar="EXPRESSION", help="pytest's -k: run only the tests that match")


def run(args: argparse.Namespace) -> Report:
    paths = [str(ROOT / "tests" / "gateway" / name) for name in TESTS]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.xml"
        command = [sys.executable, "-m", "pytest", "-m", "slow or not slow", f"--junitxml={file}", *paths]
        command += ["-k", args.select] if args.select else []
        code = subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode
        suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    wrong = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    case = "fault tests with real processes"
    results = [
        Result(case, "tests passed", "tests", total - skipped - wrong, "higher", notes=f"{skipped} skipped"),
        Result(case, "tests failed", "tests", wrong),
    ]
    problems = [f"{wrong} tests failed"] if wrong else []
    problems += [f"pytest ended with {code}"] if code and not wrong else []
    return Report(results, dict(suite.attrib), problems)
