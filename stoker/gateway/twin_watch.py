"""TwinWatch: gives the live twin the gateway's requests, and says which worker became slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import stoker
from stoker.base.log import EventLog
from stoker.fleet.fleet import Fleet
from stoker.gateway.path.call import Call
from stoker.gateway.records.metrics import GatewayMetrics, Sample
from stoker.gateway.routing_settings import TwinSettings
from stoker.sim.calibration import read_calibration
from stoker.sim.live_twin import LiveTwin, PrefillWork, by_rates, calibrated

log = EventLog("twin")


class NoTwin:
    """Compares nothing."""

    def ended(self, call: Call) -> None:
        """Do nothing."""


class TwinWatch:
    """Compares predicted with actual times. `ended` is called for each request."""

    def __init__(self, twin: LiveTwin, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._twin = twin
        self._fleet = fleet
        self._clock = clock

    def ended(self, call: Call) -> None:
        route = call.route
        # A retried request waited for other workers too. An answer that is not streamed has no time of its first token.
        if route is None or call.sent_s is None or call.first_byte_s is None or call.num_retries or not call.streams:
            return
        leg = route.prefill or route.decode
        reserved = leg.reservation
        work = PrefillWork(reserved.queued_tokens, reserved.prefill_tokens, reserved.context_tokens)
        for drift in self._twin.observe(leg.worker.worker_id, work, call.first_byte_s - call.sent_s, self._clock()):
            log.warning(
                "worker_slow" if drift.is_slow else "worker_recovered",
                worker=drift.worker_id,
                ratio=round(drift.ratio, 2),
                typical_ratio=round(drift.typical_ratio, 2),
                actual_ms=round(1e3 * drift.actual_s, 1),
                predicted_ms=round(1e3 * drift.predicted_s, 1),
                requests=drift.num_requests,
            )
        for worker_id in set(self._twin.ratios()) - {member.worker_id for member in self._fleet.members()}:
            self._twin.forget(worker_id)

    def add_gauges(self, metrics: GatewayMetrics) -> None:
        def ratios() -> Iterator[Sample]:
            return (((("worker", str(name)),), ratio) for name, ratio in self._twin.ratios().items())

        def slow() -> Iterator[Sample]:
            named = set(self._twin.slow())
            return (((("worker", str(name)),), float(name in named)) for name in self._twin.ratios())

        metrics.gauges(
            "stoker_gateway_twin_ratio", "Actual over predicted time to first token, mean of the last minute", ratios
        )
        metrics.gauges("stoker_gateway_worker_slow", "1 if the worker is much slower than predicted", slow)


def make_twin(
    settings: TwinSettings, fleet: Fleet, metrics: GatewayMetrics, clock: Callable[[], float]
) -> TwinWatch | NoTwin:
    """Return the live twin of these settings. Raises CalibrationError for a file that cannot be used."""
    if not settings.enabled:
        return NoTwin()
    if settings.calibration is not None:
        predict = calibrated(read_calibration(settings.calibration, stoker.__version__))
    else:
        predict = by_rates(
            lambda: [fleet.prefill_rate(member) for member in fleet.members()],
            lambda: [fleet.step_s(member) for member in fleet.members()],
        )
    watch = TwinWatch(LiveTwin(predict, is_absolute=settings.calibration is not None), fleet, clock)
    watch.add_gauges(metrics)
    return watch
