"""fleet.toml: what is taken, what is refused and in which words, and what is started for it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import ConfigError
from stoker.cli.main import main
from stoker.cli.up import serve_options
from stoker.gateway.config import load
from stoker.up import toml
from stoker.up.config import FleetConfig, ServeOption, fleet_config, merged
from stoker.up.default import default_table
from stoker.up.machine import GIB, Machine, visible_gpus
from stoker.up.plan import FleetModel, FleetPaths, FleetPlan, Listening, Planner
from stoker.up.ports import PlannedPorts

# As `stoker serve` has them; here so that what is tested does not change with its flags.
OPTIONS: Mapping[str, ServeOption] = {
    "role": ServeOption("--role", str, ("unified", "prefill", "decode")),
    "host": ServeOption("--host", str),
    "port": ServeOption("--port", int),
    "device": ServeOption("--device", str),
    "threads": ServeOption("--threads", int),
    "served_name": ServeOption("--served-name", str, repeatable=True),
    "no_events": ServeOption("--no-events", bool),
    "log_level": ServeOption("--log-level", str, ("debug", "info")),
    **{
        name: ServeOption(f"--{name.replace('_', '-')}", str)
        for name in (
            "kv_store",
            "kv_disk",
            "kv_disk_key_file",
            "kv_mooncake",
            "kv_mooncake_protocol",
            "kv_mooncake_ssd",
        )
    },
    **{
        name: ServeOption(f"--{name.replace('_', '-')}", float)
        for name in (
            "kv_host_gib",
            "kv_disk_gib",
            "kv_mooncake_segment_gib",
            "kv_memory_gib",
            "gpu_memory_gib",
            "drain_s",
        )
    },
    "gateway": ServeOption("--gateway", str, repeatable=True),
    "secret_file": ServeOption("--secret-file", Path),
    "offline": ServeOption("--offline", bool),
    "cache_dir": ServeOption("--cache-dir", Path),
}
MACHINE = Machine(ram_bytes=64 * GIB, shared_bytes=8 * GIB, disk_bytes=500 * GIB, gpu_bytes=(80 * GIB, 80 * GIB))


def config_of(text: str) -> FleetConfig:
    return fleet_config(tomllib.loads(text), OPTIONS)


def plan_of(config: FleetConfig, machine: Machine = MACHINE) -> FleetPlan:
    models = {one.model: FleetModel("/models/m", one.model or "small", 2 * GIB) for one in config.workers}
    place = FleetPaths(Path("/run"), Path("/run/secret"), Path("/run/token"))
    ports = PlannedPorts()
    gateway = Listening("127.0.0.1", ports.take("127.0.0.1", 8000))
    return Planner(config, OPTIONS, machine, models, place, ports, ["/bin/master"]).plan(gateway)


def flags(plan: FleetPlan, name: str) -> dict[str, Any]:
    command = next(part.command for part in plan.parts if part.name == name)
    found: dict[str, Any] = {}
    for word, after in zip(command, [*command[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = True if after.startswith("--") else after
    return found


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gatewy]", "gatewy: no such table; did you mean gateway?"),
        ("[workers]\ncount = 1", "workers: it must be written [[workers]], once for each kind of worker"),
        ("", "there is no worker: at least one [[workers]] is needed"),
        ("[[workers]]\ncuont = 2", "workers.cuont: no such setting; did you mean workers.count?"),
        ("[[workers]]\nthread = 2", "workers.thread: no such setting; did you mean workers.threads?"),
        ("[[workers]]\n[[workers]]\ncount = 0", "workers[1].count=0: it must be above zero"),
        ("[[workers]]\ncount = 'two'", "workers.count: expected `int`, got `str`"),
        ("[[workers]]\nthreads = 'two'", "workers.threads='two': it must be an integer"),
        ("[[workers]]\nthreads = true", "workers.threads=True: it must be an integer"),
        ("[[workers]]\nno_events = 1", "workers.no_events=1: it must be true or false"),
        ("[[workers]]\nlog_level = 'loud'", "workers.log_level='loud': it must be debug or info"),
        ("[[workers]]\nrole = 'boss'", "workers.role='boss': it must be unified, prefill or decode"),
        (
            "[[workers]]\ngateway = 'http://x'",
            "workers.gateway: not for a worker to set: the fleet's own gateway is meant",
        ),
        ("[[workers]]\ndevice = 'cpu'\ndevices = [0]", "workers: device='cpu' and devices=[0]: give one of them"),
        ("[[workers]]\ndevices = [-1]", "workers.devices: -1: cards are counted from 0"),
        ("[[workers]]\nname = 'a b'", "workers.name='a b': up to 41 letters, digits and . _ - are allowed"),
        ("[[workers]]\n[workers.env]\nA = 1", "workers.env[...]: expected `str`, got `int`"),
        ("[[workers]]\n[workers.env]\n'A=B' = 'x'", "workers.env: 'A=B': no environment can hold that"),
        ('[[workers]]\n[workers.env]\nA = "x\\u0000"', "workers.env: 'A': no environment can hold that"),
        ('[[workers]]\ndevice = "x\\u0000"', "workers.device='x\\x00': no command can hold that"),
        ("[[workers]]\nport = 70000", "workers.port=70000: a port is 0 to 65535"),
        ("[[workers]]\nport = -1", "workers.port=-1: a port is 0 to 65535"),
        ("[[workers]]\nport = 65534\ncount = 3", "workers.port=65534 for 3 workers: a port is 0 to 65535"),
        (
            "[[workers]]\nrole = 'prefill'\ncount = 3",
            "the embedded model: 3 prefill and no decode or unified workers: nobody would write its answers",
        ),
        ("store = 3\n[[workers]]", "store=3: it must be a table, [store]"),
        ("[[workers]]\n[store]\nhost_gb = 3", "store.host_gb: no such setting; did you mean store.host_gib?"),
        ("[[workers]]\n[store]\nhost_gib = -1", "store.host_gib=-1: it must not be below zero"),
        ("[[workers]]\n[store]\ndisk_gib = 0", "store.disk_gib=0: it must be above zero"),
        ("[[workers]]\n[store]\ndisk_key_file = 'k'", "store.disk_key_file=k: there is no store.disk_dir to encrypt"),
        ("[[workers]]\n[store]\nssd_dir = 's'", "store.ssd_dir=s: there is no store.mooncake to use it"),
        ("[[workers]]\n[store]\nmooncake = 'yes'", "store.mooncake='yes': it must be 'start', or a master's HOST:PORT"),
        ("[[workers]]\n[store]\nname = '../x'", "store.name='../x': up to 41 letters, digits and . _ - are allowed"),
        (
            "[[workers]]\n[up]\nfirst_pause_s = 9\nlongest_pause_s = 3",
            "up.first_pause_s=9 > up.longest_pause_s=3: the first pause is the shortest",
        ),
        ("[[workers]]\n[gateway]\nconfig = 3", "gateway.config=3: it must be the path of a gateway's file"),
        ("[[workers]]\n[gateway]\nconfig = '/not/there'", "/not/there: cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_work_is_refused_by_name_and_number(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(text)
    assert refused.value.message == complaint


def test_workers_get_their_options_ports_and_tiers() -> None:
    plan = plan_of(
        config_of("""
        [[workers]]
        role = "prefill"
        count = 2
        model = "org/m"
        threads = 4
        served_name = ["a", "b"]
        no_events = true
        env = { OMP = "1" }
        [[workers]]
        role = "decode"
        model = "org/m"
        port = 9000
        kv_host_gib = 1
        [store]
        host_gib = 2
        disk_dir = "/kv"
        mooncake = "start"
        ssd_dir = "/ssd"
        """)
    )
    assert [(part.name, part.role, part.address) for part in plan.parts] == [
        ("mooncake", "store", "127.0.0.1:8001"),
        ("gateway", "gateway", "http://127.0.0.1:8000"),
        ("prefill-0", "prefill", "http://127.0.0.1:8003"),
        ("prefill-1", "prefill", "http://127.0.0.1:8004"),
        ("decode-0", "decode", "http://127.0.0.1:9000"),
    ]
    prefill, decode = flags(plan, "prefill-1"), flags(plan, "decode-0")
    assert prefill["--threads"] == "4"
    assert prefill["--no-events"] is True
    assert prefill["--kv-store"] == decode["--kv-store"] == plan.store_name == "stoker-8000"
    assert (prefill["--kv-host-gib"], decode["--kv-host-gib"]) == ("2.0", "1")
    assert (prefill["--kv-disk"], prefill["--kv-disk-gib"]) == ("/kv", "16.0")
    assert (prefill["--kv-mooncake"], prefill["--kv-mooncake-ssd"]) == ("127.0.0.1:8001", "/ssd/prefill-1")
    assert (prefill["--gateway"], prefill["--secret-file"]) == ("http://127.0.0.1:8000", "/run/secret")
    command = next(part.command for part in plan.parts if part.name == "prefill-1")
    assert [command[i + 1] for i, word in enumerate(command) if word == "--served-name"] == ["a", "b"]
    assert next(part.env for part in plan.parts if part.name == "prefill-0") == {"OMP": "1"}
    assert plan.parts[0].command == ("/bin/master", "--rpc_port=8001", "--metrics_port=8002")
    assert plan.gateway_table["worker"][2] == {"url": "http://127.0.0.1:9000", "role": "decode"}


def test_workers_keep_compiled_kernels_where_the_fleet_keeps_all_else() -> None:
    assert flags(plan_of(config_of("[[workers]]\n[up]\ncache_dir = '/c'")), "unified-0")["--cache-dir"] == "/c"
    assert "--cache-dir" not in flags(plan_of(config_of("[[workers]]")), "unified-0")


def test_cards_are_taken_in_turns_and_shared_fairly() -> None:
    plan = plan_of(config_of("[[workers]]\ncount = 3\ndevices = [0, 1]"))
    cards = [flags(plan, f"unified-{n}")["--device"] for n in range(3)]
    assert cards == ["cuda:0", "cuda:1", "cuda:0"]
    # Alone on its card, a worker finds out itself.
    assert [flags(plan, f"unified-{n}").get("--gpu-memory-gib") for n in range(3)] == ["40.0", None, "40.0"]
    plan = plan_of(config_of("[[workers]]\ncount = 2\ndevices = [0]\nkv_memory_gib = 3"))
    assert flags(plan, "unified-1")["--kv-memory-gib"] == "3"
    assert "--gpu-memory-gib" not in flags(plan, "unified-1")
    plan = plan_of(config_of("[[workers]]\ncount = 20\ndevices = [0]"))  # of a small model as many as there is room for
    assert flags(plan, "unified-19")["--gpu-memory-gib"] == "4.0"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[workers]]\ndevices = [2]", "workers.devices: card 2: this machine has 2, counted from 0"),
        (
            "[[workers]]\ncount = 21\ndevices = [1]",
            "card 1 has 80.0 GiB free for 21 workers, 3.8 for each: with 2.0 GiB",
        ),
        ("[[workers]]\n[store]\nhost_gib = 9", "store.host_gib=9: /dev/shm has 8.00 GiB free"),
        (
            "[[workers]]\n[[workers]]\nmodel = 'x'\n[store]\nhost_gib = 5",
            "store.host_gib=5 for each of 2 models: /dev/shm has 8.00 GiB free",
        ),
        ("[[workers]]\nport = 8000", "port 8000 of 127.0.0.1 cannot be used: another part of this fleet has it"),
        ("[[workers]]\ncount = 2\nport = 9\n[[workers]]\nport = 10", "port 10 of 127.0.0.1 cannot be used"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_with_its_numbers(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(config_of(text))
    assert complaint in refused.value.message


def test_the_gateways_table_is_merged_with_its_file_and_written_as_toml(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(
        "log_level = 'debug'\n[listen]\nport = 9\ndrain_s = 5\n[[price]]\nmodel = 'a\"b'\ninput = 1\noutput = 2.5\n"
    )
    config = config_of(f"[[workers]]\n[gateway]\nconfig = '{file}'\n[gateway.listen]\nport = 10\n")
    assert config.gateway["listen"] == {"port": 10, "drain_s": 5}
    written = tmp_path / "written.toml"
    written.write_text(toml.dumps(plan_of(config).gateway_table))
    read = load(written)
    assert (read.log_level, read.listen.drain_s, read.price[0].model, read.price[0].output) == ("debug", 5, 'a"b', 2.5)
    assert [worker.url for worker in read.worker] == ["http://127.0.0.1:8001"]


def test_any_table_comes_back_from_toml() -> None:
    table = {"a b": [1, -2.5, True, "\x7f \U0001f600 \\ \n\t\"'"], "t": {"x": {}, "y": [{"z": "é"}, {}]}, "big": 10**15}
    assert tomllib.loads(toml.dumps(table)) == table


def test_tables_are_merged_and_lists_added_up() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "l": [1], "x": 1}, {"a": {"c": 3}, "l": [2], "x": {}}) == {
        "a": {"b": 1, "c": 3},
        "l": [1, 2],
        "x": {},
    }


def test_the_default_fleet_fits_the_machine() -> None:
    config = fleet_config(default_table({"prefill": 1, "decode": 1}, None, MACHINE, Path("/cache")), OPTIONS)
    plan = plan_of(config)
    assert [part.name for part in plan.parts] == ["gateway", "prefill-0", "decode-0"]
    assert [flags(plan, name)["--device"] for name in ("prefill-0", "decode-0")] == ["cuda:0", "cuda:1"]
    assert (config.store.host_gib, config.store.disk_dir, config.store.disk_gib) == (2.0, Path("/cache/kv"), 8.0)
    poor = Machine(ram_bytes=2 * GIB, shared_bytes=64 << 20, disk_bytes=GIB // 4)
    table = default_table({"unified": 1}, "org/m", poor, Path("/cache"))
    assert table == {"workers": [{"role": "unified", "count": 1, "model": "org/m"}], "store": {}}


def test_the_default_fleet_fits_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.up.machine.available_ram", lambda: GIB)
    machine = Machine.look(tmp_path)
    assert machine.ram_bytes == GIB
    store = default_table({"unified": 1}, None, replace(machine, shared_bytes=8 * GIB), tmp_path)["store"]
    assert store["host_gib"] == 0.12


def test_a_host_tier_that_its_container_could_not_fill_is_refused() -> None:
    small = replace(MACHINE, ram_bytes=4 * GIB)
    plan_of(config_of("[[workers]]\n[store]\nhost_gib = 4"), small)
    with pytest.raises(ConfigError, match=r"store\.host_gib=5: 4\.00 GiB of RAM are free .* container"):
        plan_of(config_of("[[workers]]\n[store]\nhost_gib = 5"), small)


def test_cards_are_those_that_cuda_shows() -> None:
    assert visible_gpus((1, 2, 3), None) == (1, 2, 3)
    assert visible_gpus((1, 2, 3), "2,0") == (3, 1)
    assert visible_gpus((1, 2, 3), "") == ()
    assert visible_gpus((1, 2, 3), "-1") == ()
    assert visible_gpus((1, 2, 3), "GPU-a,GPU-b") == (1, 2)


def test_every_option_of_serve_is_known_with_its_type() -> None:
    options = serve_options()
    assert options["threads"] == ServeOption("--threads", int)
    assert options["no_events"] == ServeOption("--no-events", bool)
    assert options["served_name"].repeatable
    assert options["kv_memory_gib"].kind is float
    assert "unified" in options["role"].choices


def test_check_shows_what_would_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("[gateway.listen]\nport = 7000\n[[workers]]\ncount = 2\nthreads = 1\nenv = { A = 'b c' }\n")
    assert main(["up", "--check", str(file), "--host", "0.0.0.0"]) == 0
    shown = capsys.readouterr().out
    assert "unified-1  unified  http://127.0.0.1:7002" in shown
    assert "A='b c'" in shown
    assert "--threads 1" in shown


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[workers]]\nthraeds = 1", "fleet.toml: workers.thraeds: no such setting; did you mean workers.threads?"),
        (
            "[[workers]]\n[gateway.listen]\nprot = 1",
            "[gateway] listen.prot: no such setting; did you mean listen.port?",
        ),
        ("[[workers]]\n[gateway.listen]\nport = 70000", "[gateway] listen.port=70000: a port is 0 to 65535"),
        ("]", "fleet.toml: not TOML"),
    ],
)
def test_a_wrong_file_ends_with_code_2(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    assert main(["up", "--check", str(file)]) == 2
    assert complaint in capsys.readouterr().err


def test_flags_of_a_fleet_without_a_file_do_not_go_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("[[workers]]\n")
    assert main(["up", "--check", str(file), "--decode", "2"]) == 2
    assert "--decode is for a fleet without a file" in capsys.readouterr().err
    assert main(["up", "--check", "org/model"]) == 2
    assert "a model is named with --model org/model" in capsys.readouterr().err
    assert main(["up", "--check", "--unified", "-1"]) == 2
    assert "--unified -1: it must not be below zero" in capsys.readouterr().err
    assert main(["up", "--check", "--unified", "0"]) == 2
    assert "there is no worker" in capsys.readouterr().err


def test_the_example_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of it, also those that stand there as comments."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gateway.toml").write_text("log_level = 'debug'")
    text = (Path(__file__).parents[2] / "examples" / "fleet.toml").read_text()
    options = serve_options()
    config = fleet_config(tomllib.loads(text), options)
    assert [(one.role, one.count) for one in config.workers] == [("prefill", 1), ("decode", 2)]
    lines = [line.removeprefix("#!") for line in text.splitlines()]
    assert sum(line.startswith("#!") for line in text.splitlines()) > 10
    everything = fleet_config(tomllib.loads("\n".join(lines)), options)
    assert everything.store.mooncake == "start"
    load(None, everything.gateway)
