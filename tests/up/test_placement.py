"""Fleets whose workers run on other machines: what is refused, and the commands that a placement completes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from stoker.base.bound_socket import bound_socket
from stoker.base.errors import ConfigError
from stoker.cli.main import main
from stoker.cli.up import _gateway_files
from stoker.up.footprint import footprint_words
from stoker.up.gateway_files import check_readable, with_sent_files
from stoker.up.part import (
    ENDPOINT,
    GATEWAY_FILE,
    GATEWAY_LIST,
    HOST,
    MOONCAKE,
    NODE_RANK,
    PORT,
    PYTHON,
    SECOND_ENDPOINT,
    SECRET_FILE,
    NodeRequest,
)
from stoker.up.placement.local import LocalPlacement
from stoker.up.placement.ray_placement import RayPlacement
from stoker.up.plan import FleetPlan
from tests.up.test_fleet_config import MACHINE, config_of, flags, plan_of

RAY = '[up]\nplacement = "ray"\n'
ALL = f'{RAY}gateway_placement = "ray"\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[up]\nplacement = "slurm"\n[[workers]]', "up.placement='slurm': give local or ray"),
        (f"{RAY}[[workers]]\nport = 9000", 'workers.port: with up.placement="ray", each worker gets an address'),
        (
            f'{RAY}[[workers]]\nhead = "a:1"\nnodes = 2',
            'workers.head: with up.placement="ray", each worker gets an address',
        ),
        (f"{RAY}[[workers]]\ndevices = [0]", "Ray assigns the GPUs"),
        (f"{RAY}[store]\nhost_gib = 1\n[[workers]]", "store.host_gib: RAM tiers are not supported"),
        (f"{RAY}[[workers]]\nnodes = 2\nnode_rank = 1", "workers.node_rank: `stoker up` sets this itself"),
        (
            '[up]\ngateway_placement = "ray"\n[[workers]]',
            "up.gateway_placement='ray' has no effect without up.placement=\"ray\"",
        ),
        ('[up]\ngateway_resource = "x"\n[[workers]]', "up.gateway_resource='x' has no effect without up.placement"),
        ('[up]\nmooncake_resource = "x"\n[[workers]]', "up.mooncake_resource='x' has no effect without up.placement"),
        ("[up]\ngateways = 2\n[[workers]]", "up.gateways=2: one machine needs only one; use gateway.listen.processes"),
        (f"{RAY}gateways = 2\n[[workers]]", 'up.gateways=2: write gateway_placement = "ray" under [up]'),
        (f'{RAY}gateway_resource = "x"\n[[workers]]', 'no effect without up.gateway_placement="ray"'),
        (f'{RAY}mooncake_resource = "x"\n[[workers]]', 'no effect without store.mooncake="start"'),
        (
            f'{RAY}gateway_resource = "GPU"\n[[workers]]',
            "up.gateway_resource='GPU': give the name of a custom resource",
        ),
        (f"{ALL}gateways = 0\n[[workers]]", "up.gateways=0: give a whole number from 1 to 64"),
        (f"{ALL}[[workers]]", 'gateway.store is a file: with up.gateway_placement="ray", a gateway may move'),
        (f'{ALL}[gateway]\nstore = "usage.db"\n[[workers]]', "gateway.store is 'usage.db': with up.gateway_placement"),
        (
            f'{ALL}[gateway]\nstore = "none"\nlisten = {{ host = "127.0.0.1" }}\n[[workers]]',
            'gateway.listen.host=127.0.0.1: with up.gateway_placement="ray", each gateway listens on the address of its node',
        ),
        ("[[workers]]\nnodes = 2", 'workers.nodes=2: write placement = "ray" under [up], or give `head`'),
    ],
)
def test_what_only_one_machine_can_do_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(text)
    assert complaint in refused.value.message


def test_a_placed_worker_learns_its_address_where_it_runs() -> None:
    plan = plan_of(config_of(f'{RAY}[[workers]]\ncount = 2\nmodel = "org/name"\ndevice = "cuda"\ntp = 2'))
    part = next(part for part in plan.parts if part.name == "unified-1")
    assert part.address == ""
    assert part.command[0] == PYTHON
    assert "org/name" in part.command  # found where it runs, not in this machine's cache
    found = flags(plan, "unified-1")
    assert found["--host"] == HOST
    assert found["--port"] == PORT
    assert found["--secret-file"] == SECRET_FILE
    assert found["--gateway-file"] == GATEWAY_LIST
    assert "--gateway" not in found
    assert "--head" not in found
    assert "--offline" not in found
    assert (part.request.nodes, part.request.gpus_per_node) == (1, 2)
    assert part.request.uses_gpus(False)
    assert "worker" not in plan.gateway_table  # they register themselves


def test_ranks_that_share_gpus_need_fewer_of_them() -> None:
    plan = plan_of(config_of(f"{RAY}[[workers]]\ntp = 4\nranks_per_gpu = 2"))
    assert next(part for part in plan.parts if part.name == "unified-0").request.gpus_per_node == 2


def test_workers_elsewhere_use_no_memory_of_this_machine() -> None:
    assert list(footprint_words(config_of(f"{RAY}[[workers]]\ncount = 99"), {}, MACHINE)) == []


def test_a_worker_on_several_nodes_gets_a_head() -> None:
    plan = plan_of(config_of(f"{RAY}[[workers]]\nnodes = 2\ntp = 2\npp = 2"))
    part = next(part for part in plan.parts if part.name == "unified-0")
    found = flags(plan, "unified-0")
    assert (found["--head"], found["--node-rank"], found["--nodes"]) == (SECOND_ENDPOINT, NODE_RANK, "2")
    assert (part.request.nodes, part.request.gpus_per_node) == (2, 2)
    assert [part.request.uses_gpus(are_there) for are_there in (False, True)] == [False, True]


def test_a_cluster_that_is_not_there_is_an_error_at_once() -> None:
    pytest.importorskip("ray")
    with bound_socket("127.0.0.1", 0) as bound:  # no process listens there
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"up.ray_address='{address}' cannot be reached: .*Connection refused"):
            RayPlacement(address, LocalPlacement({}))


NO_STORE = '[gateway]\nstore = "none"\n'


def request_of(plan: FleetPlan, name: str) -> NodeRequest:
    request = next(part.request for part in plan.parts if part.name == name)
    assert request is not None
    return request


def test_gateways_and_the_master_are_placed_before_the_workers_that_need_their_addresses() -> None:
    text = f'{ALL}gateways = 2\ngateway_resource = "front"\nmooncake_resource = "meta"\n{NO_STORE}'
    plan = plan_of(config_of(f'{text}[store]\nmooncake = "start"\n[[workers]]\ncount = 2'))
    assert [part.name for part in plan.parts] == ["mooncake", "gateway-0", "gateway-1", "unified-0", "unified-1"]
    assert [part.rule.start_rank for part in plan.parts] == [0, 1, 1, 2, 2]
    assert not any(part.address for part in plan.parts)
    worker = plan.parts[-1]
    assert flags(plan, "unified-1")["--kv-mooncake"] == MOONCAKE
    assert worker.addresses == {MOONCAKE: "mooncake"}
    assert request_of(plan, "unified-1").lists == {GATEWAY_LIST: ("gateway-0", "gateway-1")}
    assert request_of(plan, "gateway-1").resource == "front"
    assert request_of(plan, "gateway-1").ports == (8000, 0)
    assert request_of(plan, "gateway-1").stays
    assert not request_of(plan, "gateway-1").uses_gpus(True)
    assert request_of(plan, "mooncake").resource == "meta"
    values = {ENDPOINT: "10.0.0.4:5000", SECOND_ENDPOINT: "10.0.0.4:5001"}
    master = plan.parts[0].placed(values)
    assert (master.address, master.health_url) == ("10.0.0.4:5000", "http://10.0.0.4:5001/health")


def test_only_the_first_gateway_runs_the_autoscaler() -> None:
    autoscale = 'autoscale = { mode = "on", max_workers = 2 }\n'
    plan = plan_of(config_of(f"{ALL}gateways = 2\n{NO_STORE}{autoscale}[[workers]]\nmax_count = 2"))
    modes = [
        tomllib.loads(request_of(plan, f"gateway-{number}").texts[GATEWAY_FILE])["autoscale"]["mode"]
        for number in (0, 1)
    ]
    assert modes == ["on", "off"]


def test_a_gateway_elsewhere_gets_all_files_that_its_settings_name() -> None:
    table = {
        "admin_token_file": "/run/token",
        "secret_file": "/run/secret",
        "metrics_token_file": "/etc/metrics",
        "twin": {"enabled": True, "calibration": "/etc/calibration"},
        "recording": {"file": "/var/record"},
        "worker": [{"url": "http://a"}, {"url": "http://b", "api_key_file": "/etc/b"}],
    }
    keys = _gateway_files()
    assert ("listen", "tls_key") in keys
    new, files = with_sent_files(table, keys)
    found = {str(path): name for name, path in files.items()}
    assert set(found) == {"/run/token", "/run/secret", "/etc/metrics", "/etc/calibration", "/etc/b"}
    assert new["secret_file"] == found["/run/secret"]
    assert new["twin"] == {"enabled": True, "calibration": found["/etc/calibration"]}
    assert new["worker"] == [{"url": "http://a"}, {"url": "http://b", "api_key_file": found["/etc/b"]}]
    assert new["recording"] == {"file": "/var/record"}
    with pytest.raises(ConfigError, match=r"gateway\.worker\.api_key_file=/etc/no: cannot be read: No such file"):
        check_readable({"worker": [{"api_key_file": "/etc/no"}]}, keys)


def test_a_check_says_which_processes_ray_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'{ALL}{NO_STORE}[store]\nmooncake = "start"\n[[workers]]\n')
    assert main(["up", "--check", str(file)]) == 0
    said = capsys.readouterr().out
    for name in ("mooncake   store    ", "gateway    gateway  ", "unified-0  unified  "):
        assert f"{name}a Ray node" in said


def test_the_example_of_a_ray_fleet_is_valid() -> None:
    text = (Path(__file__).parents[2] / "examples" / "ray-fleet.toml").read_text()
    plan = plan_of(config_of("\n".join(line.removeprefix("#!") for line in text.splitlines())))
    assert [part.name for part in plan.parts][:4] == ["mooncake", "gateway-0", "gateway-1", "unified-0"]
    assert request_of(plan, "mooncake").resource == "meta"
    config_of(text)
