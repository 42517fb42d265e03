"""Parsers of foreign engines' metrics pages and load endpoints. Pure: bytes in, LoadReport out."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from stoker.fleet.spec import LoadReport

# name{labels} value. The metric names of both engines contain a colon.
_LINE = rb"^(?:%b)(\{[^\n]*\})? ([0-9eE.+-]+)\r?$"
_VLLM_RUNNING = re.compile(_LINE % rb"vllm:num_requests_running", re.MULTILINE)
_VLLM_WAITING = re.compile(_LINE % rb"vllm:num_requests_waiting", re.MULTILINE)
_VLLM_KV = re.compile(_LINE % rb"vllm:(?:kv|gpu)_cache_usage_perc", re.MULTILINE)
_VLLM_CONFIG = re.compile(_LINE % rb"vllm:cache_config_info", re.MULTILINE)
_SGLANG_RUNNING = re.compile(_LINE % rb"sglang:num_running_reqs", re.MULTILINE)
_SGLANG_WAITING = re.compile(_LINE % rb"sglang:num_queue_reqs", re.MULTILINE)
_SGLANG_USAGE = re.compile(_LINE % rb"sglang:token_usage", re.MULTILINE)
_SGLANG_TOKENS = re.compile(_LINE % rb"sglang:max_total_num_tokens", re.MULTILINE)
_LABEL = re.compile(rb'(num_gpu_blocks|block_size)="(\d{1,15})"')
_MOST = 1e15  # larger numbers on a page are wrong


def vllm_load(page: bytes) -> LoadReport | None:
    """Parse vLLM's `/metrics`; None for any other page. With data parallelism there is one line per engine."""
    running = _values(_VLLM_RUNNING, page)
    if not running:
        return None
    num_blocks, block_tokens = 0, None
    for match in _VLLM_CONFIG.finditer(page):
        labels = dict(_LABEL.findall(match[1] or b""))
        num_blocks += int(labels.get(b"num_gpu_blocks", 0))
        block_tokens = int(labels[b"block_size"]) if b"block_size" in labels else block_tokens
    return LoadReport(
        waiting_sequences=int(sum(_values(_VLLM_WAITING, page))),
        running_sequences=int(sum(running)),
        kv_used=_mean(_values(_VLLM_KV, page)),
        num_blocks=num_blocks or None,
        block_tokens=block_tokens,
    )


def sglang_load(page: bytes, page_tokens: int | None) -> LoadReport | None:
    """Parse SGLang's `/metrics`, which exists only with --enable-metrics."""
    running = _values(_SGLANG_RUNNING, page)
    if not running:
        return None
    capacity = int(sum(_values(_SGLANG_TOKENS, page)))
    return LoadReport(
        waiting_sequences=int(sum(_values(_SGLANG_WAITING, page))),
        running_sequences=int(sum(running)),
        kv_used=_mean(_values(_SGLANG_USAGE, page)),
        num_blocks=capacity // page_tokens if capacity and page_tokens else None,
        block_tokens=page_tokens,
    )


class _SglangLoad(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int = 0
    token_usage: float | None = None
    max_total_num_tokens: int = 0


class _SglangLoads(msgspec.Struct):
    loads: list[_SglangLoad]


def sglang_loads(answer: bytes, page_tokens: int | None) -> LoadReport | None:
    """Parse SGLang's `/v1/loads`: one entry per data-parallel rank."""
    try:
        loads = msgspec.json.decode(answer, type=_SglangLoads, strict=False).loads
    except msgspec.DecodeError:
        return None
    if not loads:
        return None
    capacity = sum(load.max_total_num_tokens for load in loads)
    used = sum(load.num_used_tokens for load in loads)
    shares = [load.token_usage for load in loads if load.token_usage is not None]
    return LoadReport(
        waiting_tokens=sum(load.num_waiting_uncached_tokens for load in loads),
        waiting_sequences=sum(load.num_waiting_reqs for load in loads),
        running_sequences=sum(load.num_running_reqs for load in loads),
        kv_used=_mean(shares) if shares else used / capacity if capacity else 0.0,
        num_blocks=capacity // page_tokens if capacity and page_tokens else None,
        block_tokens=page_tokens,
    )


def page_size(server_info: bytes) -> int | None:
    """Return `page_size` from SGLang's `/server_info`, or None."""
    try:
        value: Any = msgspec.json.decode(server_info)
    except msgspec.DecodeError:
        return None
    size = value.get("page_size") if isinstance(value, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def model_names(answer: bytes) -> list[str] | None:
    """Return the model names in a `/v1/models` answer, or None if it is something else."""
    try:
        value: Any = msgspec.json.decode(answer)
        return [card["id"] for card in value["data"] if isinstance(card["id"], str)]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None


def _values(pattern: re.Pattern[bytes], page: bytes) -> list[float]:
    found = []
    for match in pattern.finditer(page):
        try:
            value = float(match[2])
        except ValueError:
            continue
        if 0 <= value <= _MOST:
            found.append(value)
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
