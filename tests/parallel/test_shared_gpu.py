"""Ranks that share GPUs: which GPU a rank has, and what goes through the host."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from tiny import SHAPE

from stoker.base.config import EngineSettings, NodeSettings, RankSettings
from stoker.base.errors import ConfigError
from stoker.engine.memory import resolve_on
from stoker.engine.ranks.rank_process import rank_device
from stoker.kernels.rank_exchange import SLOT_BYTES, buffer_bytes, max_programs
from stoker.models.family import family_of
from stoker.parallel.threads import ThreadWorld
from stoker.parallel.through_host import HostCollectives

# Multiprocessors of an A100, the fewest of a GPU that several ranks would share.
MULTIPROCESSORS = 108


@pytest.mark.parametrize(
    ("first", "per_gpu", "expected"),
    [(None, 1, [0, 1, 2, 3]), (None, 2, [0, 0, 1, 1]), (None, 4, [0, 0, 0, 0]), (3, 2, [3, 3, 4, 4])],
)
def test_neighbouring_ranks_share_a_gpu(first: int | None, per_gpu: int, expected: list[int]) -> None:
    settings = EngineSettings(ranks=RankSettings(tp=4, per_gpu=per_gpu))
    resolved = resolve_on(
        torch.device("cpu"), settings, family_of({**SHAPE, "architectures": ["LlamaForCausalLM"]}, "here").shape
    )
    assert rank_device(resolved, 3, per_gpu).device.type == "cpu"
    on_gpu = replace(resolved, device=torch.device("cuda") if first is None else torch.device("cuda", first))
    assert [rank_device(on_gpu, rank, per_gpu).device.index for rank in range(4)] == expected


def test_ranks_that_cannot_share_gpus_are_an_error_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="--tp 3 --pp 2 makes 6 ranks, which --ranks-per-gpu 4"):
        EngineSettings(ranks=RankSettings(tp=3, pp=2, per_gpu=4))
    with pytest.raises(ConfigError, match="--ranks-per-gpu 2 with --nodes 2"):
        EngineSettings(ranks=RankSettings(tp=4, per_gpu=2), nodes=NodeSettings(2, 0, "10.0.0.7:7000"))


@pytest.mark.parametrize("per_gpu", [1, 2, 3, 4, 8])
def test_waiting_programs_leave_multiprocessors_to_the_other_kernels(per_gpu: int) -> None:
    assert max_programs(per_gpu) >= 8
    assert per_gpu == 1 or per_gpu * max_programs(per_gpu) <= MULTIPROCESSORS - 32
    assert buffer_bytes(max_programs(per_gpu)) == 2 * max_programs(per_gpu) * SLOT_BYTES <= 8 << 20


def test_collectives_through_the_host_are_those_of_the_host() -> None:
    world, found = ThreadWorld(2), {}

    def run(rank: int) -> None:
        group = HostCollectives(world.group((0, 1), rank))
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (10 if rank else 1)
        into = torch.zeros(2)
        sent = group.send(x[0], 1 - rank)
        group.receive(into, 1 - rank).wait()
        sent.wait()
        found[rank] = [torch.stack(group.gather(x)), group.sum(x.clone()), torch.stack(group.swap(x)), into]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank in range(2):
        gathered, total, swapped, received = (one.tolist() for one in found[rank])
        assert gathered == [[[1, 2], [3, 4]], [[10, 20], [30, 40]]]
        assert total == [[11, 22], [33, 44]]
        assert swapped == [[[1, 2], [10, 20]], [[3, 4], [30, 40]]][rank]
        assert received == [[10, 20], [1, 2]][rank]
