"""Builds the part of a gateway that faces the workers: fleet, watchers, router, proxy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.base.fleet_key import FleetKey
from stoker.base.long_task import TaskErrors
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.lost_blocks import LostBlocks
from stoker.gateway.config import GatewayConfig, read_secret
from stoker.gateway.doctor.cache_doctor import CacheDoctor
from stoker.gateway.duties import Duties
from stoker.gateway.membership import Membership
from stoker.gateway.path.dialects.dialect import resuming_dialects
from stoker.gateway.path.handoff_hints import HandoffHints
from stoker.gateway.path.moves import Moves
from stoker.gateway.path.proxy import Proxy
from stoker.gateway.path.services import CleanupTasks, ProxyServices
from stoker.gateway.path.upstream import Upstreams
from stoker.gateway.prefix.conversation_keys import PrefixKeyMakers
from stoker.gateway.prefix.stable_json import StableJson
from stoker.gateway.recording import RoutingClasses, routing_classes
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.gateway.watch.other_work import OtherWork
from stoker.gateway.watch.watchers import Watchers, WatchSettings
from stoker.gateway.watch.worker_signers import WorkerSigners


@dataclass(frozen=True, slots=True)
class WorkerSide:
    """The components that know the workers and talk to them."""

    deciding: RoutingClasses  # has the fleet, the load book, the prefix indexes and the router
    doctor: CacheDoctor
    key_makers: PrefixKeyMakers
    upstreams: Upstreams
    watchers: Watchers
    other_work: OtherWork
    duties: Duties
    membership: Membership
    proxy: Proxy

    @property
    def fleet(self) -> Fleet:
        return self.deciding.fleet

    @property
    def load_book(self) -> LoadBook:
        return self.deciding.load_book

    def max_model_tokens(self, model: str) -> int | None:
        """Return the smallest context length among the Stoker workers of a model; other engines do not report it here."""
        infos = [self.watchers.info(member.worker_id) for member in self.fleet.models().get(model, [])]
        return min((info.max_model_tokens for info in infos if info is not None), default=None)


def build_worker_side(
    config: GatewayConfig,
    fleet_key: FleetKey | None,
    metrics: GatewayMetrics,
    name: str,
    clock: Callable[[], float],
    errors: TaskErrors,
) -> WorkerSide:
    """Create the components that face the workers. `name` identifies this gateway to them."""
    losses = LostBlocks(clock)
    deciding = routing_classes(config, losses)
    fleet, load_book, indexes = deciding.fleet, deciding.load_book, deciding.indexes
    doctor = CacheDoctor(losses, StableJson(config.proxy.volatile_line))
    key_makers = PrefixKeyMakers(volatile_lines=config.proxy.volatile_line)
    signers, worker_keys = WorkerSigners(fleet_key), _worker_api_keys(config)
    upstreams = Upstreams(api_keys=worker_keys, signers=signers)
    moves = Moves(fleet, upstreams, clock, resuming_dialects())
    duties = Duties(fleet, moves, clock)
    other_work = OtherWork(load_book, name)
    watchers = Watchers(
        fleet,
        indexes,
        key_makers,
        WatchSettings(tokenize=config.routing.tokenize),
        signers=signers,
        api_keys=worker_keys,
        clock=clock,
        on_lost=upstreams.cut,
        on_moving=duties.saw_moving,
        on_role=duties.saw_role,
        other_work=other_work,
    )
    hints = HandoffHints(watchers.info)
    services = ProxyServices(fleet, upstreams, config.proxy, metrics, CleanupTasks(), clock, doctor, moves, hints, name)
    proxy = Proxy(
        deciding.router, services, resume_grace_s=config.proxy.resume_grace_s, debug_routes=config.routing.debug_routes
    )
    membership = Membership(fleet, load_book, watchers, upstreams, moves, clock, errors=errors)
    return WorkerSide(deciding, doctor, key_makers, upstreams, watchers, other_work, duties, membership, proxy)


def _worker_api_keys(config: GatewayConfig) -> dict[str, str]:
    """Return the API keys that the gateway sends to workers, by worker URL."""
    keys = {one.url.rstrip("/"): read_secret(one.api_key_file, "api_key_file") for one in config.worker}
    return {url: key for url, key in keys.items() if key is not None}
