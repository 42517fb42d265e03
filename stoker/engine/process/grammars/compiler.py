"""Grammars for the engine, by xgrammar. Compiling is slow and happens on a thread of its own; matching is a few microseconds.

A matcher that knows how many tokens it may have ends in time: near the end nothing new is begun, and at the end the
shortest way out that was found is taken. It refuses to know which schema keywords can be held to (schema/enforce.py).
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from stoker.base.errors import InvalidRequest
from stoker.engine.process.grammars.module_stub import standing_in
from stoker.engine.process.grammars.schema.enforce import enforceable
from stoker.engine.process.grammars.trials import GrammarTrials, is_tame
from stoker.sched.request import GrammarSpec
from stoker.text.tokenizer import Tokenizer

# For types of tokenizers that it is never given here, xgrammar imports transformers: most of a second of every start.
with standing_in("transformers"):
    import xgrammar

_SLOW_COMPILERS = 2  # at a time, of those that may take as long as a trial
_MAX_KEPT, _MAX_KEPT_BYTES = 256, 256 << 20  # most take 100 KB, one of thousands of listed values 20 MB
# "a": 1 and no other white space: a model that may write any white space can do so for ever.
_SEPARATORS = (", ", ": ")
_ORIGIN = re.compile(r"^(\[[\d:]+\] )?\S+\.(cc|h):\d+: ")  # where in xgrammar's sources an error was raised, and when
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')

_MAX_ENDING = 1024  # tokens; no shorter way out: there is none worth steering to
# Of the thread's CPU time, for which nothing else runs on the engine's thread. An expression that can be followed in very many ways
# at once may take minutes for either. Its answer then ends with an error: it must not depend on the time what an answer says.
_MAX_FIND_S = 5.0
_MAX_TOKEN_S = 0.5  # to match one token
_TOO_SLOW = "it can be followed in too many ways at once"
_MARGIN = 6  # tokens that a way out may grow by at a token that begins nothing
_OPENERS = frozenset(b"{[,")
# What to go on with where nothing can be closed or separated, the shortest first. In a text that follows a pattern they
# take turns: a quote may end it after any of them, and many go on past a delimiter alone.
_SHORTEST = ('""', "0", '"', "1", "[]", "{}", "@", "-", ".", "true", "null", "false", "[", "{", ">")


class TooSlow(Exception):
    """Looking for an ending takes longer than anybody should wait."""


class Endings:
    """Short ways from a matcher's state to the end, for one vocabulary. Greedy: short, not always the shortest."""

    def __init__(self, vocabulary: Sequence[bytes], vocab_size: int, stop_id: int) -> None:
        self._ids: dict[bytes, int] = {}
        for token_id, text in enumerate(vocabulary):
            if text:
                self._ids.setdefault(text, token_id)
        self._vocabulary = vocabulary
        self._stop_id = stop_id
        self._sorted = sorted(range(len(vocabulary)), key=vocabulary.__getitem__)
        self._places = np.zeros(-(-vocab_size // 32) * 32, dtype=np.int32)  # of the token ids in it
        self._places[self._sorted] = np.arange(len(vocabulary))
        single = np.array([token_id for text, token_id in self._ids.items() if len(text) == 1], dtype=np.int32)
        self._byte_words, self._byte_bits = single >> 5, np.int32(1) << (single & 31)
        closers = sorted((text for text in self._ids if not text.strip(b'"}]')), key=len, reverse=True)
        self._string_closers = self._known(text for text in closers if text[:1] == b'"' and b'"' not in text[1:])
        self._closers = self._known(text for text in closers if b'"' not in text)
        self._quote = self._known([b'"'])
        self._separators = self._known([b",", b":"])
        self._shortest = self._known(text.encode() for text in _SHORTEST)
        self._single = self._known(bytes([byte]) for byte in [*range(0x20, 0x7F), 0x0A, *range(0x80, 0x100)])
        begins = np.array([bool(_OPENERS.intersection(text)) for text in vocabulary], dtype=bool)
        bits = np.ones(-(-vocab_size // 32) * 32, dtype=bool)
        bits[: len(begins)] = ~begins
        self.begin_nothing = np.packbits(bits, bitorder="little").view(np.int32)

    def _known(self, texts: Any) -> list[int]:
        return [self._ids[text] for text in texts if text in self._ids]

    def find(self, matcher: xgrammar.GrammarMatcher) -> list[int] | None:
        """Tokens that end the output, a stop token last; None if there is no way. Raises TooSlow."""
        until_s = time.thread_time() + _MAX_FIND_S
        ahead = matcher.fork()
        mask = np.zeros(len(self.begin_nothing), dtype=np.int32)
        used: Counter[int] = Counter()
        tried: Counter[int] = Counter()  # since something was closed or separated
        ending: list[int] = []
        while len(ending) < _MAX_ENDING:
            if time.thread_time() > until_s:
                raise TooSlow
            if ahead.is_completed():
                return [*ending, self._stop_id]
            ahead.fill_next_token_bitmask(mask[None])
            token_id = self._forced(mask)
            if token_id is None:
                token_id = self._chosen(mask, used, tried)
            if token_id is None or not ahead.accept_token(token_id):
                return None
            ending.append(token_id)
        return None

    def _forced(self, mask: np.ndarray[Any, Any]) -> int | None:
        """The longest token that all allowed ones go along with: of the text that must come next, as far as tokens tell.
        (The matcher could spell that text out, but only all of it: a few rules may make it longer than memory.)"""
        if np.count_nonzero(mask[self._byte_words] & self._byte_bits) > 1:
            return None
        words = np.flatnonzero(mask)
        bits = np.flatnonzero(np.unpackbits(mask[words].view(np.uint8), bitorder="little"))
        allowed = np.sort(self._places[words[bits >> 5] << 5 | bits & 31])
        if not len(allowed):
            return None
        first, last = (self._vocabulary[self._sorted[place]] for place in (allowed[0], allowed[-1]))
        for place in allowed[1:]:
            # Of a text's beginnings the longest comes last: where they part, the next one does not go on from there.
            if not (text := self._vocabulary[self._sorted[place]]).startswith(first):
                break
            first = text
        for length in range(min(len(first), len(last)), 0, -1):
            if first[:length] == last[:length] and (token_id := self._ids.get(first[:length])) is not None:
                return token_id
        return None

    def _chosen(self, mask: np.ndarray[Any, Any], used: Counter[int], tried: Counter[int]) -> int | None:
        def allowed(token_id: int) -> bool:
            return bool(mask[token_id >> 5] >> (token_id & 31) & 1)

        brace, end_brace = self._ids.get(b"{"), self._ids.get(b"}")
        # Both may come: then they are a string's content.
        in_string = brace is not None and end_brace is not None and allowed(brace) and allowed(end_brace)
        first = self._string_closers if in_string else [*self._closers, *self._separators]
        if not in_string and any(map(allowed, self._separators)):
            first = self._quote + first  # it can only end a string: none begins where a separator may stand
        for token_id in first:
            # An expression may want the same token many times, or may have a way on only past it.
            if allowed(token_id) and used[token_id] < 32:
                used[token_id] += 1
                tried.clear()
                return token_id
        candidates = [token_id for token_id in self._shortest if allowed(token_id) and tried[token_id] < 8]
        if not candidates:
            candidates = [token_id for token_id in self._single if allowed(token_id)]
        if not candidates:
            candidates = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[:1].tolist()
        if not candidates:
            return None
        token_id = min(candidates, key=tried.__getitem__)
        tried[token_id] += 1
        return token_id


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Compiled:
    grammar: xgrammar.CompiledGrammar
    endings: Endings
    first_ending: int | None  # tokens of the shortest output that was found
    reserve: int  # tokens before the last possible moment from which on nothing new is begun
    num_bytes: int


class XGrammarMatcher:
    """`max_tokens`: how many it will be given in all, a stop token among them; None: no end is steered to."""

    def __init__(self, compiled: Compiled, max_tokens: int | None = None) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled.grammar)
        self._endings = compiled.endings
        self._left = sys.maxsize if max_tokens is None else max_tokens
        self._ending: list[int] | None = None  # from here on; None: not looked for at this token
        # The number of tokens left at which an ending is looked for: ever closer together as the end comes near.
        self._look_at = -1
        self._reserve = 0
        self._spent_s = 0.0  # since the token before
        self.too_slow = False
        if max_tokens is not None and compiled.first_ending is not None:
            self._reserve = _MARGIN + min(compiled.reserve, max_tokens // 4)
            self._look_at = self._next_look(compiled.first_ending)
            if self._left <= self._look_at:
                self._look()

    @property
    def done(self) -> bool:
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        started_s = time.thread_time()
        if not self._matcher.accept_token(token_id):
            return False
        self.too_slow |= self._spent_s + time.thread_time() - started_s > _MAX_TOKEN_S
        self._spent_s = 0.0
        self._left -= 1
        if self._ending is not None and self._ending[0] == token_id:
            self._ending = self._ending[1:] or None
        else:
            self._ending = None
            if self._left <= self._look_at and not self.done:
                self._look()
        return True

    def fill(self, allowed: Tensor) -> None:
        started_s = time.thread_time()
        self._matcher.fill_next_token_bitmask(allowed[None])
        self._spent_s += time.thread_time() - started_s
        if self._ending is None or (spare := self._left - len(self._ending)) > self._reserve:
            return
        mask = allowed.numpy()
        if spare > _MARGIN:
            mask &= self._endings.begin_nothing
        else:
            mask[:] = 0
        token_id = self._ending[0]
        mask.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def _look(self) -> None:
        try:
            self._ending = self._endings.find(self._matcher)
        except TooSlow:
            self.too_slow = True
        self._look_at = self._next_look(len(self._ending)) if self._ending is not None else self._left // 2

    def _next_look(self, ending: int) -> int:
        spare = self._left - ending - self._reserve
        return self._left - max(1, spare // 4)


class XGrammars:
    """`prepare` may be called by several threads; `matcher` by the engine's alone. What was prepared is found while somebody keeps
    it, or while it is one of the last used."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, trials: GrammarTrials | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._trials = trials
        self._slow_compilers = threading.Semaphore(_SLOW_COMPILERS)
        self._with_control = frozenset(
            i for i in range(tokenizer.vocab_size) if _CONTROL.search(tokenizer.token_bytes(i))
        )
        self._living: WeakValueDictionary[GrammarSpec, Compiled] = WeakValueDictionary()  # whoever keeps them
        self._kept: OrderedDict[GrammarSpec, Compiled] = OrderedDict()  # by us, the last used
        self._kept_bytes = 0
        self._compilers: dict[frozenset[int], tuple[xgrammar.GrammarCompiler, Endings]] = {}
        self._lock = threading.Lock()
        self._making_compiler = threading.Lock()

    def prepare(self, spec: GrammarSpec) -> Compiled:
        with self._lock:
            if (found := self._living.get(spec)) is not None:
                self._keep(spec, found)
                return found
        compiled = self._compile(spec) if is_tame(spec) else self._compile_tried(spec)
        with self._lock:
            self._living[spec] = compiled
            self._keep(spec, compiled)
        return compiled

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int | None = None) -> XGrammarMatcher:
        matcher = XGrammarMatcher(self.prepare(spec), max_tokens)
        for token_id in token_ids:
            matcher.accept(token_id)
        return matcher

    def warm_up(self) -> None:
        """Half a second of reading the vocabulary that the first request need not wait for."""
        self.prepare(GrammarSpec("json_object"))

    def _keep(self, spec: GrammarSpec, compiled: Compiled) -> None:
        if (before := self._kept.pop(spec, None)) is not None:
            self._kept_bytes -= before.num_bytes
        self._kept[spec] = compiled
        self._kept_bytes += compiled.num_bytes
        while len(self._kept) > _MAX_KEPT or self._kept_bytes > _MAX_KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.num_bytes

    def _compile_tried(self, spec: GrammarSpec) -> Compiled:
        if self._trials is not None:
            self._trials.check(spec)
        with self._slow_compilers:
            return self._compile(spec)

    def _compile(self, spec: GrammarSpec) -> Compiled:
        try:
            compiler, endings = self._compiler(self._silent(spec))
            grammar = _compile(compiler, spec)
            first = endings.find(xgrammar.GrammarMatcher(grammar))
        except (RuntimeError, ValueError, TypeError, TooSlow) as error:
            reason = _TOO_SLOW if isinstance(error, TooSlow) else _ORIGIN.sub("", " ".join(str(error).split()))[:500]
            raise InvalidRequest(f"not a usable {spec.kind}: {reason}", code="invalid_grammar") from error
        # How much a single token can begin is not known; all that the grammar spells out is more, a token being 3 bytes.
        spelled = sum(len(text) for text in _LITERAL.findall(str(grammar.grammar))) // 3
        num_bytes = grammar.memory_size_bytes
        return Compiled(grammar, endings, None if first is None else len(first), min(64, spelled), num_bytes)

    def _silent(self, spec: GrammarSpec) -> frozenset[int]:
        """Tokens that stand for no text: special ones, but where a tool format is written in them; and in JSON those with
        control characters, which the compiler allows in strings of a given length."""
        ends, token_bytes = self._tokenizer.eos_token_ids, self._tokenizer.token_bytes
        silent = set(self._tokenizer.special_ids)
        if spec.kind == "structural_tag":
            marks = _spelled(json.loads(spec.text))
            silent -= {
                token_id
                for token_id in self._tokenizer.special_ids
                if token_id not in ends and token_bytes(token_id).decode("utf-8", "replace") in marks
            }
        if spec.kind in ("json_object", "json_schema", "structural_tag"):
            silent |= self._with_control
        return frozenset(silent)

    def _compiler(self, silent: frozenset[int]) -> tuple[xgrammar.GrammarCompiler, Endings]:
        with self._making_compiler:
            if silent not in self._compilers:
                self._compilers[silent] = self._make_compiler(silent)
            return self._compilers[silent]

    def _make_compiler(self, silent: frozenset[int]) -> tuple[xgrammar.GrammarCompiler, Endings]:
        # Some tokenizers have words that were added after the model was made.
        known = range(min(self._tokenizer.vocab_size, self._vocab_size))
        vocabulary = [b"" if i in silent else self._tokenizer.token_bytes(i) for i in known]
        stop_ids = [i for i in self._tokenizer.eos_token_ids if i < self._vocab_size]
        info = xgrammar.TokenizerInfo(vocabulary, vocab_size=self._vocab_size, stop_token_ids=stop_ids)
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=256 << 20)
        return compiler, Endings(vocabulary, self._vocab_size, stop_ids[0])


def _compile(compiler: xgrammar.GrammarCompiler, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
    match spec.kind:
        case "json_object":
            return _compile_schema(compiler, {"type": "object"})
        case "json_schema":
            return _compile_schema(compiler, enforceable(json.loads(spec.text)))
        case "regex":
            return compiler.compile_regex(spec.text)
        case "ebnf":
            return compiler.compile_grammar(spec.text)
        case "structural_tag":
            return compiler.compile_structural_tag(json.dumps(_with_enforceable(json.loads(spec.text))))


def _compile_schema(compiler: xgrammar.GrammarCompiler, schema: Any) -> xgrammar.CompiledGrammar:
    return compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, separators=_SEPARATORS)


def _spelled(node: Any) -> str:
    """What a structural tag itself spells out, and not its schemas: they are the client's, and a compiler is kept for ever."""
    if isinstance(node, str):
        return f"{node}\n"
    if isinstance(node, dict):
        node = [] if node.get("type") == "json_schema" else list(node.values())
    return "".join(map(_spelled, node)) if isinstance(node, list) else ""


def _with_enforceable(node: Any) -> Any:
    """A structural tag with the schemas in it checked."""
    if isinstance(node, list):
        return [_with_enforceable(part) for part in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema":
        return node | {"json_schema": enforceable(node["json_schema"])}
    return {name: _with_enforceable(part) for name, part in node.items()}
