"""The budget for answers that clients have not read: the server has written them, and they wait in the process's memory.

An answer that is not streamed is written as a whole. A client that reads it slowly keeps it in memory, and nothing else counts
it: its request has ended. So the answers of one account, and all of them together, are bounded. Beyond the bound, the
connection that has been waiting for the longest time is closed.
"""

from __future__ import annotations

from typing import Protocol

_ACCOUNT_SHARE = 2  # one account may hold 1/2 of the budget


class AnsweredConnection(Protocol):
    """What is known here of a connection."""

    def abandon(self) -> None: ...


class UnreadAnswers:
    """Counts the bytes of unread answers, by connection and by account."""

    def __init__(self, max_bytes: int) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._waiting: dict[AnsweredConnection, tuple[str, int]] = {}  # in order of time
        self._by_account: dict[str, int] = {}  # accounts that hold nothing are removed

    def add(self, connection: AnsweredConnection, account: str, num_bytes: int) -> None:
        """Count an answer. Closes the longest waiting connections that are too many: of this account, or of all."""
        self.remove(connection)
        self._waiting[connection] = account, num_bytes
        self.held_bytes += num_bytes
        self._by_account[account] = self._by_account.get(account, 0) + num_bytes
        while self._by_account[account] > self._max_bytes // _ACCOUNT_SHARE and self._drop_oldest(connection, account):
            pass
        while self.held_bytes > self._max_bytes and self._drop_oldest(connection, None):
            pass

    def remove(self, connection: AnsweredConnection) -> None:
        """Forget a connection whose answer was read, or which is closed."""
        found = self._waiting.pop(connection, None)
        if found is None:
            return
        account, num_bytes = found
        self.held_bytes -= num_bytes
        left = self._by_account[account] - num_bytes
        if left:
            self._by_account[account] = left
        else:
            del self._by_account[account]

    def _drop_oldest(self, newest: AnsweredConnection, account: str | None) -> bool:
        for connection, (owner, _) in self._waiting.items():
            if connection is not newest and account in (None, owner):
                self.remove(connection)
                connection.abandon()
                return True
        return False  # one answer alone may exceed the budget
