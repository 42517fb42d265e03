"""FairShares: tenants share work by weight (start-time fair queueing). Pure.

The work of a tenant has a start and a finish on a virtual clock: `tokens / weight` lie between them. The tenant with the
earliest start goes first. The clock follows the starts, so a tenant that was idle has saved nothing.
"""

from __future__ import annotations

_MIN_KEPT = 64
_MAX_VIRTUAL = float(1 << 32)  # beyond it, the rounding of floats could swallow the smallest charges


class FairShares:
    """How much of its share each tenant has used."""

    __slots__ = ("_finish", "_max_kept", "_virtual")

    def __init__(self) -> None:
        self._finish: dict[str, float] = {}  # virtual time up to which each tenant has used its share
        self._virtual = 0.0
        self._max_kept = _MIN_KEPT

    def __len__(self) -> int:
        """The number of tenants that are remembered."""
        return len(self._finish)

    def start(self, tenant: str) -> float:
        """Return the virtual time at which the tenant's next work would start."""
        finish = self._finish.get(tenant, 0.0)
        return finish if finish > self._virtual else self._virtual

    def charge(self, tenant: str, tokens: int, weight: float) -> None:
        """Note that the tenant gets its next work."""
        start = self.start(tenant)
        self._finish[tenant] = start + tokens / weight
        self._virtual = start

    def correct(self, tenant: str, tokens: int, weight: float) -> None:
        """Charge the tenant for more tokens, or for less if `tokens` is negative. It is no new work."""
        self._finish[tenant] = self._finish.get(tenant, self._virtual) + tokens / weight

    def clear(self) -> None:
        """Forget what all tenants have used."""
        self._finish.clear()
        self._virtual = 0.0

    def trim(self) -> None:
        """Forget tenants without a debt, if there are many, and set the clock back. It changes no order.

        Starts that were returned before are not comparable with later ones.
        """
        if len(self._finish) <= self._max_kept and self._virtual < _MAX_VIRTUAL:
            return
        now = self._virtual
        self._finish = {tenant: finish - now for tenant, finish in self._finish.items() if finish > now}
        self._virtual = 0.0
        self._max_kept = max(_MIN_KEPT, 2 * len(self._finish))
