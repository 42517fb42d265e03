"""The contract of a dialect: run one route, by one leg or two, in the words that this kind of worker understands."""

from __future__ import annotations

from typing import ClassVar, Protocol

from stoker.base.registry import Registry
from stoker.gateway.path.call import Call
from stoker.gateway.path.legs import Legs


class Dialect(Protocol):
    resumes: ClassVar[bool]
    """A stream that was cut can be continued: run again with a call that has a memory, it sends only what is missing."""

    decodes_alone: ClassVar[bool]
    """A decode worker can compute a prompt itself. Where it cannot, a route without a prefill leg cannot run there."""

    async def run(self, call: Call, legs: Legs) -> None:
        """Answer the client. LegFailed: a worker failed, which another may make good for. Refused: the client is at fault.

        `legs.prefill` is None where decode's worker does all. What is open when this is left, by any road, is aborted.
        """


DIALECTS: Registry[type[Dialect]] = Registry("dialect", "stoker.gateway.path.dialects")
