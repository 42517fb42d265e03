"""What `stoker top` shows: the pages Now and Fleet of the dashboard as lines of text.

Names come from workers and operators. Characters that could control the terminal are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from stoker.base.errors import ConfigError
from stoker.proto import admin_api as api
from stoker.proto.admin_api import GatewayStatus, NowAnswer, SeriesAnswer, WorkerStatus
from stoker.up.terminal import printable

_BARS = "▁▂▃▄▅▆▇█"
_BAD, _GOOD, _WARN, _DIM, _BOLD, _END = "\033[31m", "\033[32m", "\033[33m", "\033[2m", "\033[1m", "\033[0m"
_COLORS = {"ready": _GOOD, "draining": _WARN, "unusable": _BAD}
_LEAST_WIDTH = 40
_POINTS = 120  # of the series that are read
_FULL_KV = 0.95


@dataclass(frozen=True, slots=True)
class TopState:
    """What the gateway answered."""

    url: str
    status: GatewayStatus
    now: NowAnswer
    series: SeriesAnswer
    workers: Sequence[WorkerStatus]


def read_state(url: str, get: Callable[[str], bytes]) -> TopState:
    """Read everything from a gateway. `get` returns the body of a path of its admin API."""
    try:
        return TopState(
            url,
            api.decode_gateway_status(get(api.ADMIN_STATUS_PATH)),
            api.decode_now(get(api.ADMIN_NOW_PATH)),
            api.decode_series(get(f"{api.ADMIN_SERIES_PATH}?step=1&n={_POINTS}")),
            api.decode_worker_list(get(api.ADMIN_FLEET_PATH)).workers,
        )
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{url} does not answer as a gateway of this version does: {error}") from error


@dataclass(frozen=True, slots=True)
class TopLook:
    """The size and colours of the view. `height` None: all lines are shown."""

    width: int = 100
    height: int | None = None
    has_color: bool = False
    has_bars: bool = True  # the terminal can show the block characters


def top_lines(state: TopState, look: TopLook) -> list[str]:
    """Return the lines of one frame. None is wider than the terminal."""
    width = max(_LEAST_WIDTH, look.width)
    paint = _Paint(look.has_color)
    lines = [_head(state, width, paint)]
    for number in state.now.silent:
        text = f"Process {number} of {state.status.processes} does not answer: the numbers are without it."
        lines.append(paint(_BAD, _cut(text, width)))
    lines.append("")
    lines += [paint.bold(line) for line in _wrapped(printable(state.now.bottleneck), width)]
    lines += ["", *_numbers(state, width, look, paint), ""]
    lines += _fleet(state.workers, width, paint)
    if look.height is not None and len(lines) > look.height:
        hidden = len(lines) - look.height + 1
        lines = [*lines[: look.height - 1], paint.dim(_cut(f"… {hidden} more lines", width))]
    return lines


class _Paint:
    def __init__(self, has_color: bool) -> None:
        self._has_color = has_color

    def __call__(self, color: str, text: str) -> str:
        return f"{color}{text}{_END}" if self._has_color and color else text

    def bold(self, text: str) -> str:
        return self(_BOLD, text)

    def dim(self, text: str) -> str:
        return self(_DIM, text)


def _head(state: TopState, width: int, paint: _Paint) -> str:
    status = state.status
    process = f", {status.processes} processes" if status.processes > 1 else ""
    draining = ", draining" if status.draining else ""
    text = f"stoker {printable(status.version)}  {printable(state.url)}  up {_duration(status.uptime_s)}{process}{draining}"
    return paint.dim(_cut(text, width))


def _numbers(state: TopState, width: int, look: TopLook, paint: _Paint) -> list[str]:
    """Return one line for each number: its name, its value in the last minute, and its last minutes as bars."""
    now, values = state.now, state.now.values
    share = _ratio(values.get("goodput_per_s"), values.get("requests_per_s"))
    money = f"{60 * (values.get('saved') or 0):.2f} {printable(now.currency)}/h" if now.has_prices else "no prices"
    ttft_bad = (values.get("ttft_p95_ms") or 0) > now.ttft_goal_ms
    itl_bad = (values.get("itl_p95_ms") or 0) > now.itl_goal_ms
    rows = [
        (
            "first token",
            f"{_ms(values.get('ttft_p50_ms'))}, p95 {_ms(values.get('ttft_p95_ms'))}",
            "ttft_p95_ms",
            ttft_bad,
        ),
        (
            "between tokens",
            f"{_ms(values.get('itl_p50_ms'))}, p95 {_ms(values.get('itl_p95_ms'))}",
            "itl_p95_ms",
            itl_bad,
        ),
        ("goodput", f"{_rate(values.get('goodput_per_s'))}, {_percent(share)}", "goodput_per_s", False),
        ("cache hits", f"{_percent(values.get('hit_ratio'))}", "hit_ratio", False),
        ("saved", money, "saved", False),
        ("prompt tokens", _rate(values.get("prompt_tokens_per_s")), "prompt_tokens_per_s", False),
        ("generated", _rate(values.get("completion_tokens_per_s")), "completion_tokens_per_s", False),
        (
            "requests",
            f"{_count(now.point.get('running_requests'))} running, {_count(now.point.get('waiting_requests'))} waiting",
            "running_requests",
            False,
        ),
    ]
    lines = []
    for name, value, column, is_bad in rows:
        text = f"{name:<15} {value:<28}"
        bars = _spark(state.series.columns.get(column, []), width - len(text) - 1) if look.has_bars else ""
        whole = _cut(f"{text} {bars}".rstrip(), width)
        lines.append(paint(_BAD, whole) if is_bad else whole)
    return lines


def _fleet(workers: Sequence[WorkerStatus], width: int, paint: _Paint) -> list[str]:
    if not workers:
        return ["No worker is connected."]
    name_width = max(len("WORKER"), *(len(printable(one.worker)) for one in workers))
    name_width = min(name_width, width // 2)
    # Columns that do not fit are left out, the last ones first.
    columns = [("ROLE", 8), ("STATE", 9), ("REQ", 5), ("KV", 5), ("RUN", 5), ("WAIT", 5), ("BACKLOG", 8), ("FLIGHT", 8)]
    columns += [("PREFILL/S", 10), ("STEP", 8)]
    left = width - name_width
    shown = []
    for name, size in columns:
        if left < size + 1:
            break
        left -= size + 1
        shown.append((name, size))
    lines = [paint.bold("WORKER".ljust(name_width) + "".join(f" {name:>{size}}" for name, size in shown))]
    for one in sorted(workers, key=lambda worker: (worker.role, worker.worker)):
        cells = _cells(one)
        name = printable(one.worker)
        # Names differ at their end: in the number of a machine, or in the port.
        line = (name if len(name) <= name_width else "…" + name[1 - name_width :]).ljust(name_width)
        for name, size in shown:
            text = f" {_cut(cells[name], size):>{size}}"
            line += paint(_COLORS.get(one.health, ""), text) if name == "STATE" else text
        lines.append(line)
    return lines


def _cells(one: WorkerStatus) -> dict[str, str]:
    report = one.report
    return {
        "ROLE": printable(one.role),
        "STATE": one.health,
        "REQ": _count(one.reserved.requests),
        "KV": "-" if report is None else _percent(report.kv_used) + ("!" if report.kv_used >= _FULL_KV else ""),
        "RUN": "-" if report is None else _count(report.running_sequences),
        "WAIT": "-" if report is None else _count(report.waiting_sequences),
        "BACKLOG": _count(one.reserved.prefill_tokens),
        "FLIGHT": _count(one.reserved.context_tokens),
        "PREFILL/S": _count(one.prefill_tokens_per_s),
        "STEP": _ms(1e3 * one.step_s),
    }


def _spark(values: Sequence[float | None], width: int) -> str:
    """Return the latest values as bars, scaled to the largest. A missing value is a space."""
    latest = list(values)[-width:] if width > 0 else []
    most = max((value for value in latest if value is not None), default=0.0)
    if most <= 0:
        return ""
    return "".join(
        " " if value is None else _BARS[min(int(len(_BARS) * value / most), len(_BARS) - 1)] for value in latest
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + _cut(word, width)
    return lines


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} ms" if 10 <= value < 1000 else f"{value:.1f} ms" if value < 10 else f"{value / 1000:.2f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{_count(value)}/s"


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _duration(seconds: float) -> str:
    hours, minutes = int(seconds) // 3600, int(seconds) // 60
    if hours >= 48:
        return f"{hours // 24} days"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
