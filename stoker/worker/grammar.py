"""Grammars for the engine, by xgrammar. Compiling is slow and happens on a thread of its own; matching is a few microseconds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import xgrammar
from torch import Tensor

from stoker.base.errors import InvalidRequest
from stoker.sched.request import GrammarSpec
from stoker.text.tokenizer import Tokenizer

_MAX_COMPILED = 256
# "a": 1 and no other white space: a model that may write any white space can do so for ever.
_SEPARATORS = (", ", ": ")


class XGrammarMatcher:
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)

    @property
    def done(self) -> bool:
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def fill(self, allowed: Tensor) -> None:
        self._matcher.fill_next_token_bitmask(allowed[None])


class XGrammars:
    """`prepare` may be called by several threads; `matcher` by the engine's alone."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[GrammarSpec, xgrammar.CompiledGrammar] = OrderedDict()
        self._compilers: dict[frozenset[int], xgrammar.GrammarCompiler] = {}
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def prepare(self, spec: GrammarSpec) -> None:
        with self._lock:
            if spec in self._compiled:
                self._compiled.move_to_end(spec)
                return
        with self._compiling:
            compiled = self._compile(spec)
        with self._lock:
            self._compiled[spec] = compiled
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int]) -> XGrammarMatcher:
        self.prepare(spec)
        with self._lock:
            compiled = self._compiled[spec]
        matcher = XGrammarMatcher(compiled)
        for token_id in token_ids:
            matcher.accept(token_id)
        return matcher

    def warm_up(self) -> None:
        """Half a second of reading the vocabulary that the first request need not wait for."""
        self.prepare(GrammarSpec("json_object"))

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        compiler = self._compiler(self._spoken_specials(spec))
        schema: dict[str, Any] = {"any_whitespace": False, "separators": _SEPARATORS}
        try:
            match spec.kind:
                case "json_object":
                    return compiler.compile_json_schema('{"type": "object"}', **schema)
                case "json_schema":
                    return compiler.compile_json_schema(spec.text, **schema)
                case "regex":
                    return compiler.compile_regex(spec.text)
                case "ebnf":
                    return compiler.compile_grammar(spec.text)
                case "structural_tag":
                    return compiler.compile_structural_tag(spec.text)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:500]
            raise InvalidRequest(f"not a usable {spec.kind}: {reason}", code="invalid_grammar") from error

    def _spoken_specials(self, spec: GrammarSpec) -> frozenset[int]:
        """Special tokens never stand for their text, but where a tool format is written in them."""
        if spec.kind != "structural_tag":
            return frozenset()
        ends = self._tokenizer.eos_token_ids
        return frozenset(
            token_id
            for token_id in self._tokenizer.special_ids
            if token_id not in ends and self._tokenizer.token_bytes(token_id).decode("utf-8", "replace") in spec.text
        )

    def _compiler(self, spoken: frozenset[int]) -> xgrammar.GrammarCompiler:
        if spoken not in self._compilers:
            vocabulary = [
                b"" if i in self._tokenizer.special_ids and i not in spoken else self._tokenizer.token_bytes(i)
                for i in range(self._tokenizer.vocab_size)
            ]
            info = xgrammar.TokenizerInfo(
                vocabulary, vocab_size=self._vocab_size, stop_token_ids=list(self._tokenizer.eos_token_ids)
            )
            self._compilers[spoken] = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=256 << 20)
        return self._compilers[spoken]
