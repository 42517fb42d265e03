"""OtherStores: the parts of the KV store that other ranks have, as the store of the first rank sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stoker.kv.blocks.transfer import KvTicket, LoadResult, OfferedBlock


class OtherStores(Protocol):
    """The stores of the other ranks, each with its part of every block. The first rank decides, and they do the same."""

    def offer(self, offered: list[OfferedBlock]) -> None:
        """Let the other ranks write these blocks into their tiers."""

    def prefetch(self, token_ids: Sequence[int], salt: str, ticket: KvTicket | None) -> None:
        """Pass on a hint."""

    def join_copied(self, own: list[OfferedBlock]) -> list[OfferedBlock]:
        """Take in blocks that this rank has copied, in the order of their offers in each KV set. Return those that all
        ranks have copied since the last call."""

    def join_loads(self, own: list[LoadResult]) -> list[LoadResult]:
        """Take in loads that have ended on this rank. Return those that have ended on all ranks since the last call, each
        with the blocks that all ranks have loaded."""

    def close(self) -> None:
        """Let the other ranks write what waits for their tiers, within seconds."""


class NoOtherStores:
    """A store that has all of each block."""

    def offer(self, offered: list[OfferedBlock]) -> None:
        pass

    def prefetch(self, token_ids: Sequence[int], salt: str, ticket: KvTicket | None) -> None:
        pass

    def join_copied(self, own: list[OfferedBlock]) -> list[OfferedBlock]:
        return own

    def join_loads(self, own: list[LoadResult]) -> list[LoadResult]:
        return own

    def close(self) -> None:
        pass
