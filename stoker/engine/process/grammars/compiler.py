"""XGrammars: compiles grammars with xgrammar and creates matchers.

Compiling is slow and runs on its own threads. Matching a token takes a few microseconds. JSON schemas are first converted
to a form that xgrammar enforces completely (schema/enforce.py).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.base.errors import InvalidRequest
from stoker.engine.grammar import Matcher
from stoker.engine.process.grammars.compile_cost import is_cheap_to_compile
from stoker.engine.process.grammars.endings import EndingSearch, EndingTooSlow
from stoker.engine.process.grammars.forced_text import ForcedText
from stoker.engine.process.grammars.grammar_cache import GrammarCache
from stoker.engine.process.grammars.input_matcher import InputMatcher
from stoker.engine.process.grammars.input_text import InputVocabulary
from stoker.engine.process.grammars.marked_vocabulary import MarkedVocabulary
from stoker.engine.process.grammars.matcher import PreparedGrammar, XGrammarMatcher
from stoker.engine.process.grammars.rejections import Rejections
from stoker.engine.process.grammars.schema.enforce import enforceable
from stoker.engine.process.grammars.string_vocabulary import StringVocabulary
from stoker.engine.process.grammars.text_grammars import PreparedInput, compile_text
from stoker.engine.process.grammars.trials import GrammarTrials, SentGrammar
from stoker.engine.process.grammars.xgrammar_import import xgrammar
from stoker.sched.draft_tape import TAPE_TOKENS
from stoker.sched.request import GrammarSpec, InputGrammar
from stoker.text.tokenizer import Tokenizer

_MAX_SLOW_COMPILATIONS = 2  # at a time, of grammars that needed a trial
_COMPILER_CACHE_BYTES = 256 << 20
# Write "a": 1, with no other white space. A model that may write any white space can do so forever.
_SEPARATORS = (", ", ": ")
_SOURCE_LOCATION = re.compile(r"^(\[[\d:]+\] )?\S+\.(cc|h):\d+: ")  # xgrammar's errors start with it
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_CONTROL_BUT_TAB = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_LENGTH_LIMIT = re.compile(r'"(?:min|max)Length"')
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_TOO_AMBIGUOUS = "it is too ambiguous, so matching it takes too long; simplify its repetitions"


@dataclass(frozen=True, slots=True)
class _VocabularyTools:
    """What is made once for each set of textless tokens."""

    info: xgrammar.TokenizerInfo
    compiler: xgrammar.GrammarCompiler
    endings: EndingSearch
    forced_text: ForcedText


class XGrammars:
    """`prepare` can be called from several threads, `matcher` and `forced_start` only from the engine's
    thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, trials: GrammarTrials | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._trials = trials
        self._slow_compilations = threading.Semaphore(_MAX_SLOW_COMPILATIONS)
        self._control_ids = frozenset(
            i for i in range(tokenizer.vocab_size) if _CONTROL.search(tokenizer.token_bytes(i))
        )
        self._tab_ids = frozenset(i for i in self._control_ids if not _CONTROL_BUT_TAB.search(tokenizer.token_bytes(i)))
        self._rejections = Rejections()
        self._cache = GrammarCache()
        self._cache_lock = threading.Lock()
        self._compilers: dict[frozenset[int], _VocabularyTools] = {}
        self._compilers_lock = threading.Lock()
        self._inputs: dict[tuple[str, str], InputVocabulary] = {}  # by opening and end; a tool format has one
        self._inputs_lock = threading.Lock()

    def prepare(self, spec: GrammarSpec) -> PreparedGrammar:
        with self._cache_lock:
            if (found := self._cache.get(spec)) is not None:
                return found
        prepared = self._compile_cheap(spec) if is_cheap_to_compile(spec) else self._compile_after_trial(spec)
        with self._cache_lock:
            self._cache.add(spec, prepared)
        return prepared

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int | None = None) -> Matcher:
        prepared = self.prepare(spec)
        outer = XGrammarMatcher(prepared, max_tokens)
        matcher: Matcher = outer
        if prepared.inputs:
            matcher = InputMatcher(outer, prepared.inputs, prepared.endings.text_of, max_tokens)
        for token_id in token_ids:
            matcher.accept(token_id)
        return matcher

    def forced_start(self, spec: GrammarSpec) -> Sequence[int]:
        return self.prepare(spec).forced_start

    def warm_up(self) -> None:
        """Read the vocabulary, which takes half a second, before the first request needs it."""
        self.prepare(GrammarSpec("json_object"))

    def _compile_cheap(self, spec: GrammarSpec) -> PreparedGrammar:
        """Compile without a trial. A grammar that is not valid is rejected without compiling it from then on."""
        self._rejections.check(spec)
        try:
            return self._compile(spec)
        except InvalidRequest as error:
            if not isinstance(error.__cause__, EndingTooSlow):  # that depends on the machine
                self._rejections.add(spec, error.message)
            raise

    def _compile_after_trial(self, spec: GrammarSpec) -> PreparedGrammar:
        sent = None if self._trials is None else self._trials.check(spec)
        if sent is not None:
            return self._restore(spec, sent)
        with self._slow_compilations:
            return self._compile(spec)

    def _restore(self, spec: GrammarSpec, sent: SentGrammar) -> PreparedGrammar:
        """Return a grammar that was compiled in its trial."""
        tools = self._tools(self._textless_ids(spec))
        grammar = xgrammar.CompiledGrammar.deserialize_json(sent.serialized.decode(), tools.info)
        return self._prepared(spec, tools, grammar, sent.first_ending, sent.reserve)

    def _compile(self, spec: GrammarSpec) -> PreparedGrammar:
        try:
            tools = self._tools(self._textless_ids(spec))
            grammar = _compile(tools.compiler, spec)
            first = tools.endings.find(xgrammar.GrammarMatcher(grammar))
        except EndingTooSlow as error:
            raise _not_usable(spec, _TOO_AMBIGUOUS) from error
        except (RuntimeError, ValueError, TypeError) as error:
            raise _not_usable(spec, _SOURCE_LOCATION.sub("", " ".join(str(error).split()))[:500]) from error
        # How much one token can open is not known. All literals of the grammar are an upper bound, at 3 bytes per token.
        num_literal_tokens = sum(len(text) for text in _LITERAL.findall(str(grammar.grammar))) // 3
        first_ending = None if first is None else len(first)
        return self._prepared(spec, tools, grammar, first_ending, min(64, num_literal_tokens))

    def _prepared(
        self,
        spec: GrammarSpec,
        tools: _VocabularyTools,
        grammar: xgrammar.CompiledGrammar,
        first_ending: int | None,
        reserve: int,
    ) -> PreparedGrammar:
        inputs = [
            PreparedInput(
                begin=one.begin.encode(),
                opening=one.opening.encode(),
                is_string=one.end == '"',
                text=compile_text(one.grammar, self.input_vocabulary(one)),
            )
            for one in spec.inputs
        ]
        return PreparedGrammar(
            grammar=grammar,
            endings=tools.endings,
            forced_text=tools.forced_text,
            first_ending=first_ending,
            reserve=reserve,
            num_bytes=grammar.memory_size_bytes + sum(one.text.num_bytes for one in inputs),
            allows_text=spec.allows_text,
            inputs=tuple(inputs),
            forced_start=tuple(tools.forced_text.at_start(grammar, TAPE_TOKENS)),
        )

    def input_vocabulary(self, given: InputGrammar) -> InputVocabulary:
        """Return the vocabulary of custom tools' inputs. The first call takes a second."""
        with self._inputs_lock:
            found = self._inputs.get((given.opening, given.end))
            if found is None:
                found = self._inputs[given.opening, given.end] = self._new_input_vocabulary(given)
            return found

    def _new_input_vocabulary(self, given: InputGrammar) -> InputVocabulary:
        special, token_bytes = self._tokenizer.special_ids, self._tokenizer.token_bytes
        texts = [token_bytes(i) for i in range(min(self._tokenizer.vocab_size, self._vocab_size))]
        contents = [b"" if i in special else text for i, text in enumerate(texts)]
        opening = given.opening.encode()
        if given.end == '"':
            return StringVocabulary(contents, self._vocab_size, opening)
        return MarkedVocabulary(contents, texts, self._vocab_size, opening, given.end.encode())

    def _textless_ids(self, spec: GrammarSpec) -> frozenset[int]:
        """Return the tokens that the grammar must not match as text.

        These are the special tokens, except those that a tool format is written in. In JSON they include the tokens with
        control characters, which xgrammar would allow in strings with a length limit. Free text may contain tabs unless the
        grammar has such strings.
        """
        ends, token_bytes = self._tokenizer.eos_token_ids, self._tokenizer.token_bytes
        textless = set(self._tokenizer.special_ids)
        if spec.kind == "structural_tag":
            literals = _tag_literals(json.loads(spec.text))
            textless -= {
                token_id
                for token_id in self._tokenizer.special_ids
                if token_id not in ends and token_bytes(token_id).decode("utf-8", "replace") in literals
            }
        if spec.kind in ("json_object", "json_schema", "structural_tag"):
            has_text = spec.allows_text or any(one.end != '"' for one in spec.inputs)
            keeps_tabs = has_text and not _LENGTH_LIMIT.search(spec.text)
            textless |= self._control_ids - self._tab_ids if keeps_tabs else self._control_ids
        return frozenset(textless)

    def _tools(self, textless: frozenset[int]) -> _VocabularyTools:
        with self._compilers_lock:
            if textless not in self._compilers:
                self._compilers[textless] = self._new_tools(textless)
            return self._compilers[textless]

    def _new_tools(self, textless: frozenset[int]) -> _VocabularyTools:
        # Some tokenizers have tokens that were added after the model was trained.
        known = range(min(self._tokenizer.vocab_size, self._vocab_size))
        vocabulary = [b"" if i in textless else self._tokenizer.token_bytes(i) for i in known]
        stop_ids = [i for i in self._tokenizer.eos_token_ids if i < self._vocab_size]
        info = xgrammar.TokenizerInfo(vocabulary, vocab_size=self._vocab_size, stop_token_ids=stop_ids)
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_COMPILER_CACHE_BYTES)
        endings = EndingSearch(vocabulary, self._vocab_size, stop_ids[0])
        return _VocabularyTools(info, compiler, endings, ForcedText(endings, self._tokenizer.encode))


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
            return compiler.compile_structural_tag(json.dumps(_with_enforceable_schemas(json.loads(spec.text))))


def _compile_schema(compiler: xgrammar.GrammarCompiler, schema: Any) -> xgrammar.CompiledGrammar:
    return compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, separators=_SEPARATORS)


def _tag_literals(node: Any) -> str:
    """Return the literal text of a structural tag, without its schemas.

    Schemas come from clients. A compiler is kept per set of textless tokens, so client text must not influence that set.
    """
    if isinstance(node, str):
        return f"{node}\n"
    if isinstance(node, dict):
        node = [] if node.get("type") == "json_schema" else list(node.values())
    return "".join(map(_tag_literals, node)) if isinstance(node, list) else ""


def _with_enforceable_schemas(node: Any) -> Any:
    """Convert the schemas inside a structural tag."""
    if isinstance(node, list):
        return [_with_enforceable_schemas(part) for part in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema":
        return node | {"json_schema": enforceable(node["json_schema"])}
    return {name: _with_enforceable_schemas(part) for name, part in node.items()}


def _not_usable(spec: GrammarSpec, reason: str) -> InvalidRequest:
    return InvalidRequest(f"not a usable {spec.kind}: {reason}", code="invalid_grammar")
