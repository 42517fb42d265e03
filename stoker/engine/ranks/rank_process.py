"""The entry point of a rank's process: it loads its part of the model, and executes the plans of rank 0."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from stoker.base import garbage
from stoker.base.config import EngineSettings
from stoker.base.errors import StokerError
from stoker.engine.ranks.rank_base import LocalBase, NodeBase, RankBase, tell_end
from stoker.engine.ranks.start_progress import StartProgress
from stoker.parallel.channel import PlainChannel
from stoker.parallel.collectives import ExchangeFailed
from stoker.parallel.rank_link import Kind, LinkEnd, LinkMessage, RankLink

_BEAT_EVERY_S = 0.5
_POLL_S = 0.05  # how long a launched step may wait for the next command before it is waited for

_BLAME_S = 3.0  # rank 0 is to notice the rank that ended before it hears of the exchange that failed for this reason

T = TypeVar("T")


def main() -> None:
    """Run a rank. The argument is the file descriptor of the link to the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    starter = RankLink(PlainChannel(socket.socket(fileno=int(sys.argv[1]))))
    links = [starter]  # those that learn why this rank ends
    try:
        run_rank(starter, starter.receive().table(Kind.ARGUMENTS), links.append)
    except StokerError as error:
        tell_end(links, error.message)
    except ExchangeFailed as error:
        time.sleep(_BLAME_S)
        tell_end(links, error.args[0])
    except Exception as error:
        tell_end(links, f"{type(error).__name__}: {error}")
        raise
    finally:
        sys.stderr.flush()
        os._exit(1)  # threads of collectives may wait for ranks that are gone


def run_rank(starter: RankLink, arguments: Mapping[str, Any], add_link: Callable[[RankLink], None]) -> None:
    """Load this rank's part, and execute commands until rank 0 ends."""
    from stoker.engine.draft_model import open_chosen_draft
    from stoker.engine.memory import resolve
    from stoker.engine.model_identity import read_hf_config
    from stoker.engine.part import ModelSource, build_part, identity_of, tier_share
    from stoker.engine.ranks.absent_grammars import AbsentGrammars
    from stoker.engine.ranks.commands import RankLoop
    from stoker.engine.ranks.connections import connect_ranks, rank_facts
    from stoker.engine.ranks.rank_kv_part import RankKvPart
    from stoker.models.family import family_of

    folder, rank = Path(arguments["folder"]), int(arguments["rank"])
    settings = settings_from(EngineSettings, arguments["settings"])
    hf = read_hf_config(folder)
    family = family_of(hf, str(folder / "config.json"))
    resolved = rank_device(resolve(settings, family.shape), rank % settings.ranks_per_node, settings.ranks.per_gpu)
    cache_dir = arguments["cache_dir"]
    draft = open_chosen_draft(resolved.drafters, folder, family)
    source = ModelSource(
        folder, hf, arguments["random_seed"], None, None if cache_dir is None else Path(cache_dir), draft
    )
    base: RankBase
    if settings.nodes.rank == 0:
        base = LocalBase(starter, arguments["ring"])
    else:
        base = NodeBase(starter, settings, rank, rank_facts(source, settings))
        add_link(base.link)
        settings = base.settings
    link, progress = base.link, StartProgress()
    threading.Thread(target=_beat, args=(base, progress), name="beat", daemon=True).start()
    meeting = base.order().table(Kind.MEET)
    met = connect_ranks(
        rank, source, family, settings, resolved, meeting["host"], meeting["port"], interface=base.interface
    )

    def agree_on(number: int) -> int:
        with progress.working(False):
            return met.place.agree_on(number)

    place = replace(met.place, agree_on=agree_on)
    with progress.working():
        part = build_part(family, source, settings, resolved, place, AbsentGrammars(), progress.advance)
    options = (identity_of(family, source, part), rank, meeting["engine_id"], tier_share(family, part), link.send)
    kv = RankKvPart(settings, part.kv, *options)
    link.send(LinkMessage(Kind.READY, text=kv.server.address if kv.server is not None else ""))
    if (message := base.order()).kind is not Kind.START:
        raise StokerError(f"expected START from rank 0, got {message.kind.name}")
    stages = place.stages
    loop = RankLoop(
        part.runner,
        kv,
        lambda kind, step, digest: link.send(LinkMessage(kind, step, digest)),
        samples=stages.is_first,
        deferred=stages.is_deferred,
        steps_ahead=0 if resolved.device.type == "cpu" else resolved.steps_ahead,
    )
    plans = base.start_plans()
    garbage.tune_for_serving()
    while True:
        frame = plans.receive(_POLL_S)
        if frame is None:
            loop.finish()
        else:
            loop.execute(frame)


def rank_device(resolved: Any, rank: int, ranks_per_gpu: int = 1) -> Any:
    """Return the settings with the GPU of a rank of this machine. Rank 0 has the first."""
    import torch

    if resolved.device.type != "cuda":
        return resolved
    return replace(resolved, device=torch.device("cuda", (resolved.device.index or 0) + rank // ranks_per_gpu))


def settings_from(cls: type[T], table: Mapping[str, Any]) -> T:
    """Return settings from their JSON."""
    hints = get_type_hints(cls)
    values = {}
    for one in fields(cls):  # type: ignore[arg-type]
        value = table[one.name]
        if is_dataclass(hints[one.name]):
            value = settings_from(hints[one.name], value)  # type: ignore[arg-type]
        elif isinstance(value, list):
            value = tuple(value)
        values[one.name] = value
    return cls(**values)


def _beat(base: RankBase, progress: StartProgress) -> None:
    stop = threading.Event()
    with suppress(LinkEnd):
        while not stop.wait(_BEAT_EVERY_S):
            base.link.send(LinkMessage(Kind.BEAT, progress.value))
    base.end_silently()


if __name__ == "__main__":
    main()
