"""Fleets whose workers run on other machines: what is refused, and the commands that a placement completes."""

from __future__ import annotations

import pytest

from stoker.base.bound_socket import bound_socket
from stoker.base.errors import ConfigError
from stoker.up.footprint import footprint_words
from stoker.up.part import GATEWAY_LIST, HOST, NODE_RANK, PORT, PYTHON, SECOND_ENDPOINT, SECRET_FILE
from stoker.up.placement.local import LocalPlacement
from stoker.up.placement.ray_placement import RayPlacement
from tests.up.test_fleet_config import MACHINE, config_of, flags, plan_of

RAY = '[up]\nplacement = "ray"\n'


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
