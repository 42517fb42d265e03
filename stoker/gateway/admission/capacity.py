"""How much the workers of a model may hold at a time: what admission keeps in flight. Pure.

A worker that reports its queue says itself when it is full: with sequences waiting, it gets no more than what it runs and a
few besides, so that its queue stays short and the waiting is done here, where it is fair. Others are bounded by the settings.
Prompts are bounded in seconds of prefill, at the rate that the worker reports or shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.spec import Role
from stoker.gateway.admission.fair_queue import Capacity
from stoker.gateway.config import AdmissionSettings

_REPORT_AGE_S = 5.0
_LANES_AGE_S = 0.5
_UNSURE = 8
_ANSWERING = frozenset({Role.UNIFIED, Role.DECODE})
_PREFILLING = frozenset({Role.UNIFIED, Role.PREFILL})


@dataclass(slots=True)
class Capacities:
    fleet: Fleet
    settings: AdmissionSettings
    _lanes: dict[str, str] | None = None
    _lanes_s: float = -math.inf

    def lane(self, model: str, now: float) -> str | None:
        """The queue of a model: models with the very same workers have one together. None: nobody serves it."""
        lanes = self._lanes
        if lanes is None or now - self._lanes_s >= _LANES_AGE_S or model not in lanes:
            if lanes is not None and now == self._lanes_s:
                return None
            lanes = self._lanes = self._look()
            self._lanes_s = now
        return lanes.get(model)

    def capacity(self, lane: str, now: float) -> Capacity:
        answering = self.fleet.candidates(lane, _ANSWERING, now)
        if not answering:
            return Capacity()  # nobody is usable: the router says so, and when to come again
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
        # Seen from outside, a rate has the network and the worker's own queue in it: only a worker's own word is taken strictly.
        reported = member.report is not None and member.report.prefill_tokens_per_s is not None
        least = self.settings.prefill_tokens * (1 if reported else _UNSURE)
        return max(self.fleet.prefill_rate(member) * self.settings.prefill_s, float(least))

    def _look(self) -> dict[str, str]:
        names: dict[frozenset[str], str] = {}
        lanes: dict[str, str] = {}
        for model, members in sorted(self.fleet.models().items()):
            workers = frozenset(str(member.worker_id) for member in members)
            lanes[model] = names.setdefault(workers, model)
        return lanes
