"""A fleet behind the real router, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet, FleetSettings
from stoker.fleet.load_book import LoadBook
from stoker.fleet.prefix_index import Key
from stoker.fleet.spec import Role, WorkerSpec
from stoker.routing.policy import Policy
from stoker.routing.query import Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

BLOCK = 100


@dataclass
class World:
    """A fleet whose workers prefill 1000 tokens per second."""

    settings: RouterSettings = field(default_factory=RouterSettings)
    fleet: Fleet = field(default_factory=lambda: Fleet(FleetSettings(prefill_tokens_per_s=1000.0)))
    load_book: LoadBook = field(default_factory=LoadBook)
    indexes: PrefixIndexes = field(default_factory=PrefixIndexes)
    policy: Policy | None = None

    def __post_init__(self) -> None:
        self.router = Router(self.fleet, self.load_book, self.indexes, self.policy, self.settings)

    def add(
        self,
        worker_id: WorkerId,
        role: Role = Role.UNIFIED,
        cluster: str = "default",
        dialect: str = "stoker",
        decodes_alone: bool = True,
    ) -> None:
        spec = WorkerSpec(
            worker_id=worker_id,
            url="",
            role=role,
            models=("m",),
            cluster=cluster,
            dialect=dialect,
            decodes_alone=decodes_alone,
        )
        self.fleet.add(spec, 0.0)

    def route(
        self,
        keys: Sequence[Key],
        now: float = 0.0,
        *,
        model: str = "m",
        session: str | None = None,
        excluded: frozenset[WorkerId] = frozenset(),
        needs_dialect: frozenset[str] | None = None,
    ) -> Route:
        return self.router.route(
            RouteQuery(
                model=model,
                keys=keys,
                block_tokens=BLOCK,
                num_tokens=len(keys) * BLOCK + 1,
                max_output_tokens=10,
                session=session,
                excluded=excluded,
                needs_dialect=needs_dialect,
            ),
            now,
        )


def where(route: Route) -> tuple[str | None, str]:
    return route.prefill.worker.worker_id if route.prefill else None, route.decode.worker.worker_id
