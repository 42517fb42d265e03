"""The choice of CPU weights: measured once, stored, part of the fingerprint. A bad or unwritable file never stops a start."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.tiny_gguf import TinyGguf
from gguf import GGMLQuantizationType as Kind

from stoker.base.config import EngineSettings, KvSettings
from stoker.base.errors import ConfigError
from stoker.checkpoint.progress import silent
from stoker.checkpoint.source import resolve_model
from stoker.engine.build import build_engine
from stoker.engine.cpu_weights import DEQUANTISED, choose_cpu_weights, measure
from stoker.engine.llm import LLM
from stoker.kernels.cpu_int8 import FORMAT
from stoker.sched.request import SamplingParams

CPU = torch.device("cpu")
MODULES = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]


def gguf_config(modules: list[str]) -> Mapping[str, Any]:
    """Return the config.json of a model with one layer, in which these modules are quantised."""
    stored = {"quant_method": "gguf", "group_size": 32, "modules": [f"model.layers.0.{module}" for module in modules]}
    return {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "quantization_config": stored}


HF = gguf_config(MODULES)


class FakeTimes:
    """Returns fixed times and counts how often it was asked."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.calls = seconds, 0

    def __call__(self, num_outs: int, num_ins: int) -> Mapping[str, float]:
        assert (num_outs, num_ins) == (192, 64)
        self.calls += 1
        return self.seconds


def choose(times: FakeTimes, cache_dir: Path | None, wanted: str = "auto", hf: Mapping[str, Any] = HF) -> str | None:
    found = choose_cpu_weights(wanted, CPU, torch.float32, hf, cache_dir, times)
    return None if found.kernel is None else found.kernel.name


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def all_logs(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("stoker").propagate = True
    caplog.set_level(logging.INFO)


def test_the_fastest_is_chosen_and_stored(tmp_path: Path) -> None:
    times = FakeTimes(float32=3.0, fbgemm=2.0, onednn=1.0)
    assert [choose(times, tmp_path) for _ in range(3)] == ["onednn"] * 3
    assert times.calls == 1
    slower = FakeTimes(float32=1.0, fbgemm=2.0)
    assert choose(slower, tmp_path) == "onednn"  # the first worker's file counts for all
    assert choose(slower, tmp_path / "other") is None
    assert choose(slower, tmp_path / "other", "int8") == "fbgemm"
    assert choose(times, tmp_path, "float32") is None


def test_without_a_folder_it_is_measured_every_time() -> None:
    times = FakeTimes(float32=3.0, fbgemm=2.0)
    assert [choose(times, None), choose(times, None)] == ["fbgemm"] * 2
    assert times.calls == 2


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 100_000,
        json.dumps({"format": FORMAT, "machine": "another", "seconds": {"float32": 1.0}}).encode(),
        json.dumps({"format": "int8-0", "machine": "", "seconds": {"float32": 1.0}}).encode(),
    ],
)
def test_a_bad_file_is_ignored_with_one_warning(
    broken: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times = FakeTimes(float32=3.0, fbgemm=2.0)
    choose(times, tmp_path)
    [path] = tmp_path.iterdir()
    path.write_bytes(broken)
    assert choose(times, tmp_path) == "fbgemm"
    assert warnings_in(caplog) == ["cpu_weights_file_ignored"]
    assert choose(times, tmp_path) == "fbgemm"
    assert times.calls == 2


def test_times_that_are_not_numbers_are_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    times = FakeTimes(float32=3.0, fbgemm=2.0)
    choose(times, tmp_path)
    [path] = tmp_path.iterdir()
    content = json.loads(path.read_text())
    for seconds in ({}, {"float32": "x"}, {"float32": -1.0}, None, {"fbgemm": 1.0}):
        path.write_text(json.dumps(content | {"seconds": seconds}))
        assert choose(times, tmp_path) == "fbgemm"
    assert warnings_in(caplog) == ["cpu_weights_file_ignored"] * 5


def test_a_folder_that_cannot_be_written_does_not_stop_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    times = FakeTimes(float32=3.0, fbgemm=2.0)
    assert choose(times, tmp_path / "file" / "kernels") == "fbgemm"
    assert "cpu_weights_not_stored" in warnings_in(caplog)


def test_it_applies_only_to_quantised_weights_on_a_cpu_in_float32() -> None:
    times = FakeTimes(float32=3.0, fbgemm=2.0)
    plain = {"hidden_size": 64, "intermediate_size": 96}
    assert choose_cpu_weights("auto", CPU, torch.float64, HF, None, times) is DEQUANTISED
    assert choose_cpu_weights("auto", torch.device("cuda"), torch.float32, HF, None, times) is DEQUANTISED
    assert choose_cpu_weights("auto", CPU, torch.float32, plain, None, times) is DEQUANTISED
    for module in MODULES:  # a float32 matmul between 8-bit ones would make answers depend on the batch
        mixed = gguf_config([other for other in MODULES if other != module])
        assert choose_cpu_weights("auto", CPU, torch.float32, mixed, None, times) is DEQUANTISED
    assert times.calls == 0
    with pytest.raises(ConfigError, match="cpu_weights=int8 needs"):
        choose_cpu_weights("int8", CPU, torch.float64, HF, None, times)
    with pytest.raises(ConfigError, match="no 8-bit kernel"):
        choose(FakeTimes(float32=1.0), None, "int8")


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_model_is_served_in_8_bits(kind: Kind, tied: bool, tmp_path: Path) -> None:
    if not any(name != "float32" for name in measure(64, 64)):
        pytest.skip("no 8-bit kernel is exact on this CPU")
    path = tmp_path / "tiny.gguf"
    TinyGguf(kind=kind, tied=tied).write(path)
    folder = resolve_model(str(path), tmp_path / "cache", silent).path
    built = {}
    for weights in ("float32", "int8"):
        settings = EngineSettings(device="cpu", num_threads=1, cpu_weights=weights, kv=KvSettings(8, 64))
        built[weights] = build_engine(folder, settings, kernel_cache_dir=tmp_path)
    assert built["float32"].fingerprint != built["int8"].fingerprint
    kept = sum(parameter.nbytes for _, parameter in built["int8"].model.named_parameters())
    assert kept < sum(parameter.nbytes for _, parameter in built["float32"].model.named_parameters())


def test_a_batch_gives_the_tokens_of_each_sequence_alone(tmp_path: Path) -> None:
    if not any(name != "float32" for name in measure(64, 64)):
        pytest.skip("no 8-bit kernel is exact on this CPU")
    path = tmp_path / "tiny.gguf"
    TinyGguf(kind=Kind.Q4_1).write(path)
    folder = resolve_model(str(path), tmp_path / "cache", silent).path
    llm = LLM(folder, EngineSettings(device="cpu", num_threads=1, cpu_weights="int8", kv=KvSettings(8, 256)))
    sampling = SamplingParams(temperature=0.0)
    prompts = [[1 + (7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(8)]
    together = [output.token_ids for output in llm.generate(prompts, sampling, 12)]
    assert together == [llm.generate([prompt], sampling, 12)[0].token_ids for prompt in prompts]
