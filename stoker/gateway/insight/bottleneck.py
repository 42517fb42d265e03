"""One sentence that names what limits the fleet now, with its numbers and what to do. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.gateway.insight.latency_goals import LatencyGoals

_REFUSED_SHARE = 0.01
_FULL_KV = 0.95
_WAITING_SHARE = 0.4  # of the time to the first token, from which a queue is what limits
_EVICTED_SHARE = 0.2  # of the prompt tokens
_BACKLOG_S = 1.0


def bottleneck(values: Mapping[str, float | None], goals: LatencyGoals) -> str:
    """Return the sentence for the values of the last minute. The first rule that applies decides."""
    value = {name: one or 0.0 for name, one in values.items()}.__getitem__
    if not value("workers"):
        return "No worker is connected: start one with `stoker serve`, or add its address with --worker."
    if not value("usable_workers"):
        who = "The only worker cannot" if value("workers") == 1 else f"None of the {value('workers'):.0f} workers can"
        return f"{who} take a request: see the state on the page Fleet."
    arrivals = value("requests_per_s") + value("refused_per_s")
    if not arrivals:
        if value("running_requests") >= 0.5:
            return f"{value('running_requests'):.0f} requests are running, and none has ended in the last minute."
        return "Idle: no request in the last minute."
    if value("refused_per_s") > _REFUSED_SHARE * arrivals:
        share = value("refused_per_s") / arrivals
        return f"{share:.0%} of the requests are refused: limits of keys, or a full queue. The page Requests has the codes."
    return _of_latency(values, goals)


def _of_latency(values: Mapping[str, float | None], goals: LatencyGoals) -> str:
    value = {name: one or 0.0 for name, one in values.items()}.__getitem__
    ttft_ms, itl_ms = value("ttft_p95_ms"), value("itl_p95_ms")
    parts = {name: value(f"ttft_{name}_ms") for name in ("queue", "worker_wait", "prefill")}
    whole_ms = sum(parts.values())
    kv_full = value("kv_used_max") >= _FULL_KV
    if whole_ms and parts["queue"] > _WAITING_SHARE * whole_ms and parts["queue"] > 50:
        cause = "KV memory is full" if kv_full else "the workers are at their limit"
        return f"The gateway's queue: requests wait {_ms(parts['queue'])} on average, because {cause}. Add workers."
    if kv_full and value("running_sequences"):
        return (
            f"KV memory: a worker uses {value('kv_used_max'):.0%} of it, so sequences wait or are preempted."
            " Add KV memory or workers."
        )
    if value("backlog_s") > _BACKLOG_S:
        return (
            f"Prefill: {_count(value('backlog_tokens'))} prompt tokens wait, {value('backlog_s'):.1f} s of work on the"
            " busiest worker. Add prefill capacity."
        )
    if itl_ms > goals.itl_ms:
        return (
            f"Decode: the time between tokens is {_ms(itl_ms)} (p95), above the goal of {_ms(goals.itl_ms)}."
            " Add decode workers, or lower the batch size."
        )
    if value("evicted_tokens_per_s") > _EVICTED_SHARE * value("prompt_tokens_per_s"):
        share = value("evicted_tokens_per_s") / value("prompt_tokens_per_s")
        return f"Evictions: {share:.0%} of the prompt tokens had been cached and were evicted. More KV memory would keep them."
    if ttft_ms > goals.ttft_ms:
        name = max(parts, key=parts.__getitem__)
        words = {"queue": "the gateway's queue", "worker_wait": "the workers' queues", "prefill": "prefill"}[name]
        return f"The time to the first token is {_ms(ttft_ms)} (p95), above the goal of {_ms(goals.ttft_ms)}: mostly {words}."
    return f"No bottleneck: the first token takes {_ms(ttft_ms)} and the others {_ms(itl_ms)} each (p95)."


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.1f} s"


def _count(value: float) -> str:
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.0f}k"
