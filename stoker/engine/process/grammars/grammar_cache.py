"""GrammarCache: compiled grammars that are in use, or that were used recently. Not thread-safe."""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakValueDictionary

from stoker.engine.process.grammars.matcher import PreparedGrammar
from stoker.sched.request import GrammarSpec

# Most grammars take 100 KB. One with thousands of enum values takes 20 MB.
_MAX_RECENT, _MAX_RECENT_BYTES = 256, 256 << 20


class GrammarCache:
    """Finds a grammar while any caller keeps it, or while it is one of the most recently used."""

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[GrammarSpec, PreparedGrammar] = WeakValueDictionary()  # kept by any caller
        self._recent: OrderedDict[GrammarSpec, PreparedGrammar] = OrderedDict()  # kept by the cache itself
        self._recent_bytes = 0

    def get(self, spec: GrammarSpec) -> PreparedGrammar | None:
        prepared = self._alive.get(spec)
        if prepared is not None:
            self._use(spec, prepared)
        return prepared

    def add(self, spec: GrammarSpec, prepared: PreparedGrammar) -> None:
        self._alive[spec] = prepared
        self._use(spec, prepared)

    def _use(self, spec: GrammarSpec, prepared: PreparedGrammar) -> None:
        """Make the grammar the most recently used one, and drop the oldest beyond the limits."""
        if (before := self._recent.pop(spec, None)) is not None:
            self._recent_bytes -= before.num_bytes
        self._recent[spec] = prepared
        self._recent_bytes += prepared.num_bytes
        while len(self._recent) > _MAX_RECENT or self._recent_bytes > _MAX_RECENT_BYTES:
            _, oldest = self._recent.popitem(last=False)
            self._recent_bytes -= oldest.num_bytes
