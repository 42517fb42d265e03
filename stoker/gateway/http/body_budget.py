"""The budget for request bodies: how many bytes the server holds in total, and how many of them each account holds.

A body counts from the moment its bytes arrive until its request has ended. Nothing waits for the budget: a body that does
not fit is refused, which returns its bytes, so that the others can finish.
"""

from __future__ import annotations

PUBLIC = "public"  # the account of all clients that have shown no credentials
_ACCOUNT_SHARE = 2  # one account may hold 1/2 of the budget
_PUBLIC_SHARE = 16  # all clients without credentials together may hold 1/16 of it


class BodyBudget:
    """Counts the bytes of request bodies."""

    __slots__ = ("_account_bytes", "_held", "_public_bytes", "_total_bytes", "held_bytes")

    def __init__(self, total_bytes: int) -> None:
        self.held_bytes = 0
        self._total_bytes = total_bytes
        self._account_bytes = total_bytes // _ACCOUNT_SHARE
        self._public_bytes = total_bytes // _PUBLIC_SHARE
        self._held: dict[str, int] = {}  # by account; accounts that hold nothing are removed

    def fits(self, account: str, num_bytes: int) -> bool:
        """Return True if a body of this length could be held now. Nothing is counted yet."""
        if not self.take(account, num_bytes):
            return False
        self.give_back(account, num_bytes)
        return True

    def take(self, account: str, num_bytes: int) -> bool:
        """Count bytes of a body, or return False if they do not fit."""
        held, total = self._held.get(account, 0) + num_bytes, self.held_bytes + num_bytes
        if total > self._total_bytes or held > (self._public_bytes if account == PUBLIC else self._account_bytes):
            return False
        self._held[account] = held
        self.held_bytes = total
        return True

    def give_back(self, account: str, num_bytes: int) -> None:
        self.held_bytes -= num_bytes
        left = self._held[account] - num_bytes
        if left:
            self._held[account] = left
        else:
            del self._held[account]
