"""Why the prompt tokens of a request were computed, for the client and for the request's usage row."""

from __future__ import annotations

from stoker.gateway.doctor.cache_doctor import CacheDoctor
from stoker.gateway.doctor.miss_parts import MissPart, as_text
from stoker.gateway.path.call import Call

DEBUG_HEADER = b"x-stoker-debug"
CACHE_HEADER = b"x-stoker-cache"
_CACHE = b"cache"


def wants_cache_report(call: Call) -> bool:
    """Return True if the client sent `x-stoker-debug: cache`."""
    asked = call.request.head.by_name.get(DEBUG_HEADER)
    return asked is not None and _CACHE in [name.strip() for name in asked.lower().split(b",")]


def miss_parts(doctor: CacheDoctor, call: Call, prompt: int, cached: int, completion: int) -> tuple[MissPart, ...]:
    """Return why the uncached tokens were computed."""
    examined = call.examined
    if examined is None:
        examined = doctor.examine(call.tenant, call.envelope, call.query, call.route, prompt, completion)
        call.examined = examined
    return examined.parts(prompt, cached)


def cache_report(doctor: CacheDoctor, call: Call) -> bytes:
    """Return the value of `x-stoker-cache`, such as `prompt=3600;cached=1024;changed[message 3]=2048;new=528`."""
    running = call.running
    prompt, cached = running.prompt_tokens, running.cached_tokens
    parts = miss_parts(doctor, call, prompt, cached, running.completion_tokens)
    return ";".join([f"prompt={prompt}", f"cached={cached}", *([as_text(parts)] if parts else [])]).encode()
