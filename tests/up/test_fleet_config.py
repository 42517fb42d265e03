"""fleet.toml: what is accepted, the errors for what is refused, and the processes that are planned from it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import ConfigError
from stoker.base.settings import merged
from stoker.cli.main import main
from stoker.cli.serve_settings import serve_keys
from stoker.gateway.config import load
from stoker.up import toml
from stoker.up.config import FleetConfig
from stoker.up.default import PAIR, SINGLE, default_counts, default_table
from stoker.up.fleet_table import fleet_config
from stoker.up.footprint import footprint, footprint_words
from stoker.up.machine import GIB, Machine, visible_gpus
from stoker.up.part import PartKind
from stoker.up.plan import FleetModel, FleetPaths, FleetPlan, Listening, Planner
from stoker.up.ports import PlannedPorts

OPTIONS = serve_keys()
MACHINE = Machine(
    all_ram_bytes=96 * GIB,
    ram_bytes=64 * GIB,
    shared_bytes=8 * GIB,
    disk_bytes=500 * GIB,
    gpu_bytes=(80 * GIB, 80 * GIB),
)


def config_of(text: str) -> FleetConfig:
    return fleet_config(tomllib.loads(text), OPTIONS)


def plan_of(config: FleetConfig, machine: Machine = MACHINE) -> FleetPlan:
    models = {one.model: FleetModel("/models/m", one.model or "small", 2 * GIB) for one in config.workers}
    paths = FleetPaths(Path("/run"), Path("/run/secret"), Path("/run/token"))
    ports = PlannedPorts()
    gateway = Listening("127.0.0.1", ports.take("127.0.0.1", 8000))
    return Planner(config, OPTIONS, machine, models, paths, ports, ["/bin/master"]).plan(gateway)


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
        ("[workers]\ncount = 1", "workers: write [[workers]], once for each kind of worker"),
        (
            "",
            "there is no worker: add a [[workers]] table with a count above 0, or --unified, --prefill or --decode",
        ),
        ("[[workers]]\ncuont = 2", "workers.cuont: no such setting; did you mean workers.count?"),
        ("[[workers]]\nthread = 2", "workers.thread: no such setting; did you mean workers.threads?"),
        (
            "[[workers]]\n[[workers]]\ncount = 0",
            "workers[1].count=0: give a count of at least 1, or max_count for workers that the autoscaler starts",
        ),
        ("[[workers]]\ncount = -1", "workers.count=-1: give a whole number, at least 0"),
        ("[[workers]]\ncount = 3\nmax_count = 2", "workers: max_count=2 is below count=3; raise it or remove it"),
        (
            "[[workers]]\nmax_count = 2",
            'workers.max_count=2 has no effect without the autoscaler: write mode = "on" and max_workers under '
            "[gateway.autoscale], or remove max_count",
        ),
        (
            "[[workers]]\ncount = 0\nmax_count = 2",
            "there is no worker: add a [[workers]] table with a count above 0, or --unified, --prefill or --decode",
        ),
        ("[[workers]]\ncount = 'two'", "workers.count='two': give a whole number, at least 0"),
        ("[[workers]]\nthreads = 'two'", "workers.threads='two': give a whole number, at least 1"),
        ("[[workers]]\nthreads = true", "workers.threads=True: give a whole number, at least 1"),
        ("[[workers]]\nno_events = 1", "workers.no_events=1: give true or false"),
        ("[[workers]]\nmax_open = 0", "workers.max_open=0: give a whole number, at least 1"),
        ("[[workers]]\nkv_memory_gib = -1", "workers.kv_memory_gib=-1: give a number of GiB above 0"),
        (
            "[[workers]]\ncard_memory_gib = 4",
            "workers.card_memory_gib was renamed: write workers.gpu_memory_gib",
        ),
        ("[[workers]]\nlog_level = 'loud'", "workers.log_level='loud': give debug, info, warning or error"),
        ("[[workers]]\nrole = 'boss'", "workers.role='boss': give unified, prefill or decode"),
        (
            "[[workers]]\ngateway = 'http://x'",
            "workers.gateway: `stoker up` sets this itself: workers register with the fleet's own gateway",
        ),
        ("[[workers]]\ndevice = 'cpu'\ndevices = [0]", "workers: device='cpu' and devices=[0]: give only one of them"),
        ("[[workers]]\ndevices = [-1]", "workers.devices=-1: give a list of whole numbers, at least 0"),
        ("[[workers]]\nname = 'a b'", "workers.name='a b': give up to 41 letters, digits, '.', '_' and '-'"),
        ("[[workers]]\n[workers.env]\nA = 1", "workers.env.A=1: give a table of texts"),
        (
            "[[workers]]\n[workers.env]\n'A=B' = 'x'",
            "workers.env: 'A=B' cannot be an environment variable; rename or remove it",
        ),
        ('[[workers]]\n[workers.env]\nA = "x\\u0000"', "workers.env.A='x\\x00': give a table of texts"),
        ('[[workers]]\ndevice = "x\\u0000"', "workers.device='x\\x00': give text"),
        ("[[workers]]\nport = 70000", "workers.port=70000: give a whole number from 0 to 65535"),
        ("[[workers]]\nport = -1", "workers.port=-1: give a whole number from 0 to 65535"),
        (
            "[[workers]]\nport = 65534\ncount = 3",
            "workers.port=65534 for 3 workers: the last port would be 65536; ports end at 65535",
        ),
        (
            "[[workers]]\nrole = 'prefill'\ncount = 3",
            "the default model: there are 3 prefill workers, and no decode or unified workers that could generate answers; "
            "add one",
        ),
        ("store = 3\n[[workers]]", "store=3: write a table, [store]"),
        ("[[workers]]\n[store]\nhost_gb = 3", "store.host_gb: no such setting; did you mean store.host_gib?"),
        ("[[workers]]\n[store]\nhost_gib = -1", "store.host_gib=-1: give a number of GiB, at least 0"),
        ("[[workers]]\n[store]\ndisk_gib = 0", "store.disk_gib=0: give a number of GiB above 0"),
        (
            "[[workers]]\n[store]\ndisk_key_file = 'k'",
            "store.disk_key_file=k has no effect without store.disk_dir: give both",
        ),
        ("[[workers]]\n[store]\nssd_dir = 's'", "store.ssd_dir=s has no effect without store.mooncake: give both"),
        (
            "[[workers]]\n[store]\nmooncake = 'yes'",
            "store.mooncake='yes': give 'start', or HOST:PORT of a master that already runs",
        ),
        ("[[workers]]\n[store]\nname = '../x'", "store.name='../x': give up to 41 letters, digits, '.', '_' and '-'"),
        (
            "[[workers]]\n[up]\nfirst_pause_s = 9\nlongest_pause_s = 3",
            "up.first_pause_s=9 is larger than up.longest_pause_s=3: lower the first or raise the second",
        ),
        ("[[workers]]\n[gateway]\nconfig = 3", "gateway.config=3: give the path of a gateway's TOML file"),
        ("[[workers]]\n[gateway]\nconfig = '/not/there'", "/not/there: cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_the_allowed_range(text: str, complaint: str) -> None:
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
    assert (prefill["--kv-host-gib"], decode["--kv-host-gib"]) == ("2.0", "1.0")
    assert (prefill["--kv-disk"], prefill["--kv-disk-gib"]) == ("/kv", "16.0")
    assert (prefill["--kv-mooncake"], prefill["--kv-mooncake-ssd"]) == ("127.0.0.1:8001", "/ssd/prefill-1")
    assert (prefill["--gateway"], prefill["--secret-file"]) == ("http://127.0.0.1:8000", "/run/secret")
    command = next(part.command for part in plan.parts if part.name == "prefill-1")
    assert [command[i + 1] for i, word in enumerate(command) if word == "--served-name"] == ["a", "b"]
    assert next(part.env for part in plan.parts if part.name == "prefill-0") == {"OMP": "1"}
    assert plan.parts[0].command == (
        "/bin/master",
        "--rpc_address=127.0.0.1",
        "--rpc_port=8001",
        "--metrics_host=127.0.0.1",
        "--metrics_port=8002",
    )
    assert plan.gateway_table["worker"][2] == {"url": "http://127.0.0.1:9000", "role": "decode"}


def test_workers_use_the_cache_folder_of_the_fleet() -> None:
    assert flags(plan_of(config_of("[[workers]]\n[up]\ncache_dir = '/c'")), "unified-0")["--cache-dir"] == "/c"
    assert "--cache-dir" not in flags(plan_of(config_of("[[workers]]")), "unified-0")


def test_workers_take_gpus_in_turn_and_share_their_memory_equally() -> None:
    plan = plan_of(config_of("[[workers]]\ncount = 3\ndevices = [0, 1]"))
    gpus = [flags(plan, f"unified-{n}")["--device"] for n in range(3)]
    assert gpus == ["cuda:0", "cuda:1", "cuda:0"]
    # A worker alone on a GPU takes what is free.
    assert [flags(plan, f"unified-{n}").get("--gpu-memory-gib") for n in range(3)] == ["40.0", None, "40.0"]
    plan = plan_of(config_of("[[workers]]\ncount = 2\ndevices = [0]\nkv_memory_gib = 3"))
    assert flags(plan, "unified-1")["--kv-memory-gib"] == "3.0"
    assert "--gpu-memory-gib" not in flags(plan, "unified-1")
    plan = plan_of(config_of("[[workers]]\ncount = 20\ndevices = [0]"))
    assert flags(plan, "unified-19")["--gpu-memory-gib"] == "4.0"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[workers]]\ndevices = [2]", "workers.devices: GPU 2: this machine has 2 GPUs, counted from 0"),
        (
            "[[workers]]\ncount = 21\ndevices = [1]",
            "GPU 1 has 80.0 GiB free for 21 workers, 3.8 for each: too little with 2.0 GiB of weights",
        ),
        ("[[workers]]\n[store]\nhost_gib = 9", "store.host_gib=9: /dev/shm has 8.00 GiB free"),
        (
            "[[workers]]\n[[workers]]\nmodel = 'x'\n[store]\nhost_gib = 5",
            "store.host_gib=5 for each of 2 models: /dev/shm has 8.00 GiB free",
        ),
        ("[[workers]]\nport = 8000", "port 8000 of 127.0.0.1 cannot be used: another process of this fleet has it"),
        ("[[workers]]\ncount = 2\nport = 9\n[[workers]]\nport = 10", "port 10 of 127.0.0.1 cannot be used"),
    ],
)
def test_a_fleet_that_does_not_fit_the_machine_is_refused_with_the_numbers(text: str, complaint: str) -> None:
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


def test_a_table_written_as_toml_is_read_back_equal() -> None:
    table = {"a b": [1, -2.5, True, "\x7f \U0001f600 \\ \n\t\"'"], "t": {"x": {}, "y": [{"z": "é"}, {}]}, "big": 10**15}
    assert tomllib.loads(toml.dumps(table)) == table


def test_merging_joins_tables_and_lists() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "l": [1], "x": 1}, {"a": {"c": 3}, "l": [2], "x": {}}) == {
        "a": {"b": 1, "c": 3},
        "l": [1, 2],
        "x": {},
    }


def test_the_default_fleet_on_gpus() -> None:
    config = fleet_config(default_table(PAIR, MACHINE, Path("/cache")), OPTIONS)
    plan = plan_of(config)
    assert default_counts(MACHINE, 0) == PAIR
    assert [part.name for part in plan.parts] == ["gateway", "prefill-0", "decode-0"]
    assert [flags(plan, name)["--device"] for name in ("prefill-0", "decode-0")] == ["cuda:0", "cuda:1"]
    assert (config.store.host_gib, config.store.disk_dir, config.store.disk_gib) == (2.0, Path("/cache/kv"), 8.0)


def test_a_default_fleet_without_room_has_no_tiers() -> None:
    poor = Machine(all_ram_bytes=2 * GIB, ram_bytes=2 * GIB, shared_bytes=64 << 20, disk_bytes=GIB // 4)
    table = default_table(SINGLE, poor, Path("/cache"), "org/m", ("a", "b"))
    worker = {"role": "unified", "count": 1, "model": "org/m", "served_name": ["a", "b"], "kv_memory_gib": 0.25}
    assert table == {"workers": [worker], "store": {}}


SMOLLM2_BYTES = 515 << 20


@pytest.mark.parametrize("all_gib", [8, 12, 16, 24, 32, 64, 256])
def test_the_default_fleet_uses_less_than_a_quarter_of_the_ram(all_gib: int, tmp_path: Path) -> None:
    machine = Machine(all_gib * GIB, int(0.8 * all_gib * GIB), all_gib * GIB // 2, 500 * GIB)
    counts = default_counts(machine, SMOLLM2_BYTES)
    assert counts == (SINGLE if all_gib <= 12 else PAIR)
    config = fleet_config(default_table(counts, machine, tmp_path, weight_bytes=SMOLLM2_BYTES), OPTIONS)
    models: dict[str | None, FleetModel] = {None: FleetModel("/m", "m", SMOLLM2_BYTES, SMOLLM2_BYTES)}
    assert footprint(config, models, machine).ram < all_gib * GIB / 4
    (line,) = footprint_words(config, models, machine)
    assert f"of {all_gib}.0 GiB of RAM" in line
    assert f"GiB of disk in {tmp_path / 'kv'}" in line


def test_a_fleet_that_may_use_more_ram_than_is_free_is_announced_with_a_warning() -> None:
    machine = replace(MACHINE, gpu_bytes=(), ram_bytes=4 * GIB)
    config = config_of("[[workers]]\ncount = 4\nkv_memory_gib = 2")
    models: dict[str | None, FleetModel] = {None: FleetModel("/m", "m", GIB, GIB)}
    _, warning = footprint_words(config, models, machine)
    assert "warning: only 4.0 GiB of RAM are free" in warning


def test_the_default_fleet_fits_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.up.machine.available_ram", lambda: 4 * GIB)
    monkeypatch.setattr("stoker.up.machine.all_ram", lambda: 8 * GIB)
    machine = replace(Machine.detect(tmp_path), gpu_bytes=())
    assert (machine.all_ram_bytes, machine.ram_bytes) == (8 * GIB, 4 * GIB)
    table = default_table(SINGLE, replace(machine, shared_bytes=8 * GIB), tmp_path, weight_bytes=SMOLLM2_BYTES)
    assert table["store"]["host_gib"] < 0.3
    assert table["workers"][0]["kv_memory_gib"] < 1


def test_a_host_tier_larger_than_the_free_ram_is_refused() -> None:
    small = replace(MACHINE, ram_bytes=4 * GIB)
    plan_of(config_of("[[workers]]\n[store]\nhost_gib = 4"), small)
    with pytest.raises(ConfigError, match=r"store\.host_gib=5: 4\.00 GiB of RAM are free .* container"):
        plan_of(config_of("[[workers]]\n[store]\nhost_gib = 5"), small)


def test_only_gpus_in_cuda_visible_devices_are_used() -> None:
    assert visible_gpus((1, 2, 3), None) == (1, 2, 3)
    assert visible_gpus((1, 2, 3), "2,0") == (3, 1)
    assert visible_gpus((1, 2, 3), "") == ()
    assert visible_gpus((1, 2, 3), "-1") == ()
    assert visible_gpus((1, 2, 3), "GPU-a,GPU-b") == (1, 2)


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
        (
            "[[workers]]\n[gateway.listen]\nport = 70000",
            "[gateway] listen.port=70000: give a whole number from 0 to 65535",
        ),
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


def test_flags_of_the_default_fleet_are_refused_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("[[workers]]\n")
    assert main(["up", "--check", str(file), "--decode", "2"]) == 2
    said = capsys.readouterr().err
    assert "--decode is only for a fleet without a file" in said
    assert f'`role = "decode"` and `count = 2` under [[workers]] of {file}' in said
    assert main(["up", "--check", str(file), "--served-name", "m"]) == 2
    assert f"write `served_name = …` under [[workers]] of {file}" in capsys.readouterr().err
    assert main(["up", "--check", "--unified", "-1"]) == 2
    assert "--unified -1: give a whole number, at least 0" in capsys.readouterr().err
    assert main(["up", "--check", "--unified", "0"]) == 2
    assert "there is no worker" in capsys.readouterr().err


def test_a_model_can_be_given_instead_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--check", "org/model", "--unified", "1"]) == 0
    assert "serve org/model --served-name org/model" in capsys.readouterr().out
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert main(["up", "--check", str(folder), "--unified", "1", "--served-name", "a", "--served-name", "b"]) == 0
    shown = capsys.readouterr().out
    assert f"serve {folder} " in shown
    assert "--served-name a --served-name b" in shown
    assert main(["up", "--check", "org/model", "--model", "org/other"]) == 2
    assert "two models are given, org/model and --model org/other: give one" in capsys.readouterr().err
    assert main(["up", "--check", str(tmp_path / "nothing")]) == 2
    assert "there is no such file or folder. Give a fleet file (.toml), a model folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "where"),
    [
        ("--kv-memory-gib", "write `kv_memory_gib = …` under [[workers]] in a fleet file"),
        ("--policy", "write `routing.policy = …` under [gateway] in a fleet file"),
        ("--log-level", "write `log_level = …` under [[workers]] or `log_level = …` under [gateway]"),
    ],
)
def test_flags_of_other_commands_name_their_place_in_a_fleet_file(
    flag: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", flag, "2"]) == 2
    assert where in capsys.readouterr().err


def test_the_plan_knows_the_served_names() -> None:
    assert plan_of(config_of("[[workers]]\nserved_name = 'chat'")).models == ("chat",)
    assert plan_of(config_of("[[workers]]")).models == ("small",)


def test_the_example_file_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that are commented out with #! are valid too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gateway.toml").write_text("log_level = 'debug'")
    text = (Path(__file__).parents[2] / "examples" / "fleet.toml").read_text()
    options = serve_keys()
    config = fleet_config(tomllib.loads(text), options)
    assert [(one.role, one.count) for one in config.workers] == [("prefill", 1), ("decode", 2)]
    lines = [line.removeprefix("#!") for line in text.splitlines()]
    assert sum(line.startswith("#!") for line in text.splitlines()) > 10
    everything = fleet_config(tomllib.loads("\n".join(lines)), options)
    assert everything.store.mooncake == "start"
    load(None, everything.gateway)


SCALED = "[gateway.autoscale]\nmode = 'on'\nmax_workers = 6\n"


def test_workers_of_the_autoscaler_are_planned_with_ports_names_and_memory() -> None:
    text = f"{SCALED}[[workers]]\nrole = 'prefill'\n[[workers]]\nrole = 'decode'\ncount = 2\nmax_count = 4\ndevices = [0, 1]"
    plan = plan_of(config_of(text))
    workers = [part for part in plan.parts if part.kind is PartKind.WORKER]
    assert [(part.name, part.spare) for part in workers] == [
        ("prefill-0", False),
        ("decode-0", False),
        ("decode-1", False),
        ("decode-2", True),
        ("decode-3", True),
    ]
    assert len({part.address for part in workers}) == 5
    assert [flags(plan, part.name)["--gpu-memory-gib"] for part in workers[1:]] == ["40.0"] * 4  # two on each GPU
    assert plan.is_scaled
    assert "worker" not in plan.gateway_table, "a worker that has ended must not come back with a restarted gateway"


def test_without_its_budget_the_autoscaler_starts_no_workers() -> None:
    plan = plan_of(config_of("[gateway.autoscale]\nmode = 'on'\n[[workers]]\n"))
    assert not plan.is_scaled
    assert len(plan.gateway_table["worker"]) == 1


def test_a_dry_run_of_the_autoscaler_plans_the_same_workers() -> None:
    plan = plan_of(config_of(f"{SCALED.replace('on', 'dry_run')}[[workers]]\nmax_count = 2"))
    assert [part.spare for part in plan.parts] == [False, False, True]
    assert not plan.is_scaled, "nothing is asked of the gateway"
    assert len(plan.gateway_table["worker"]) == 1, "it knows no worker that never starts"


def test_scaled_workers_need_a_plain_gateway() -> None:
    config = config_of(f"{SCALED}[[workers]]\nmax_count = 2")
    planner = Planner(
        config,
        OPTIONS,
        MACHINE,
        {None: FleetModel("/models/m", "small", 2 * GIB)},
        FleetPaths(Path("/run"), Path("/run/secret"), Path("/run/token")),
        PlannedPorts(),
    )
    with pytest.raises(ConfigError, match="terminate TLS in front of it"):
        planner.plan(Listening("127.0.0.1", 8000, tls=True))


def test_the_footprint_counts_workers_that_may_be_started() -> None:
    models = {None: FleetModel("/models/m", "small", cpu_bytes=GIB)}
    few, many = (
        footprint(config_of(f"{SCALED}[[workers]]\n{most}kv_memory_gib = 1"), models, replace(MACHINE, gpu_bytes=()))
        for most in ("", "max_count = 3\n")
    )
    assert many.workers == 3 * few.workers
