"""How much work a model's workers may hold at a time; admission keeps this much in flight. Pure.

A worker that reports waiting sequences is full. It then gets at most its running sequences plus `waiting_per_worker`, so
that its own queue stays short and requests wait in the gateway's fair queue instead. Other workers are bounded by the
settings. Prompt tokens in flight are bounded to a number of seconds of prefill, at the rate that the worker reports or that
was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.spec import Role
from stoker.gateway.admission.admission_settings import AdmissionSettings
from stoker.gateway.admission.fair_queue import Capacity

_REPORT_AGE_S = 5.0  # an older load report is ignored
_LANES_AGE_S = 0.5  # the table of lanes is computed again after this time
_UNCERTAINTY = 8  # factor on `prefill_tokens` for a prefill rate that the gateway measured, which is uncertain
_ANSWERING = frozenset({Role.UNIFIED, Role.DECODE})
_PREFILLING = frozenset({Role.UNIFIED, Role.PREFILL})


@dataclass(slots=True)
class Capacities:
    """Computes lanes and their capacity from the state of the fleet."""

    fleet: Fleet
    settings: AdmissionSettings
    _lanes: dict[str, str] | None = None
    _lanes_s: float = -math.inf

    def lane(self, model: str, now: float) -> str | None:
        """Return the name of a model's queue, or None if no worker serves it. Models with the same workers share one."""
        lanes = self._lanes
        if lanes is None or now - self._lanes_s >= _LANES_AGE_S or model not in lanes:
            if lanes is not None and now == self._lanes_s:
                return None
            lanes = self._lanes = self._find_lanes()
            self._lanes_s = now
        return lanes.get(model)

    def capacity(self, lane: str, now: float) -> Capacity:
        answering = self.fleet.candidates(lane, _ANSWERING, now)
        if not answering:
            return Capacity()  # no worker is usable; the router refuses the request with a retry time
        prefilling = self.fleet.candidates(lane, _PREFILLING, now)
        return Capacity(
            requests=sum(self._requests(member, now) for member in answering),
            prefill_tokens=sum(self._prefill_tokens(member) for member in prefilling) or math.inf,
        )

    def _requests(self, member: Member, now: float) -> int:
        most = max(1, round(self.settings.requests_per_worker * member.spec.weight * member.share))
        report = member.report
        if report is None or now - member.reported_at > _REPORT_AGE_S or not report.waiting_sequences:
            return most
        return min(most, max(1, report.running_sequences + self.settings.waiting_per_worker))

    def _prefill_tokens(self, member: Member) -> float:
        if member.rates.prefill_tokens_per_s is None:
            return math.inf
        # A rate measured by the gateway includes the network and the worker's queue, so it is applied less strictly than a
        # rate reported by the worker.
        reported = member.report is not None and member.report.prefill_tokens_per_s is not None
        least = self.settings.prefill_tokens * (1 if reported else _UNCERTAINTY)
        return max(self.fleet.prefill_rate(member) * self.settings.prefill_s, float(least))

    def _find_lanes(self) -> dict[str, str]:
        names: dict[frozenset[str], str] = {}
        lanes: dict[str, str] = {}
        for model, members in sorted(self.fleet.models().items()):
            workers = frozenset(str(member.worker_id) for member in members)
            lanes[model] = names.setdefault(workers, model)
        return lanes
