"""The contract of a dialect: run one route, with one leg or two, in the requests that this kind of worker understands."""

from __future__ import annotations

from typing import ClassVar, Protocol

from stoker.base.registry import Registry
from stoker.gateway.path.call import Call
from stoker.gateway.path.legs import Legs
from stoker.gateway.watch.load_probe import LoadProbe


class Dialect(Protocol):
    """How one kind of worker is called. Register an implementation with `@DIALECTS.register("name")`."""

    resumes: ClassVar[bool]
    """True if another worker can continue a broken stream: `run` with a non-empty `call.memory` sends only the rest."""

    decodes_alone: ClassVar[bool]
    """True if a decode worker can compute a prompt itself. If not, it only gets requests together with a prefill worker."""

    speaks_messages: ClassVar[bool]
    """True if the worker has /v1/messages. If not, such a request is sent as a chat request, and its answer translated."""

    load_probe: ClassVar[type[LoadProbe]]
    """Reads the load of such a worker, once per health check. `NoLoadProbe` if there is nothing to read."""

    async def run(self, call: Call, legs: Legs) -> None:
        """Run the request and send the answer to the client.

        `legs.prefill` is None if the decode worker computes the prompt too. Raises LegFailed if a worker failed and another
        may succeed, and Refused if the client must get the worker's error. Responses left open are aborted by `legs`.
        """


DIALECTS: Registry[type[Dialect]] = Registry("dialect", "stoker.gateway.path.dialects")


def resuming_dialects() -> frozenset[str]:
    """Return the dialects whose workers can continue a request that another worker began."""
    return frozenset(name for name in DIALECTS if DIALECTS.get(name).resumes)
