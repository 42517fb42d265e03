"""The engine's grammars, made when the engine is ready: importing xgrammar and reading the vocabulary take as long as half of
importing torch, and a start need not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.engine.process.grammars.trials import GrammarTrials
from stoker.sched.request import GrammarSpec
from stoker.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from stoker.engine.process.grammars.compiler import Compiled, XGrammarMatcher, XGrammars


class LateGrammars:
    """`prepare` and `warm_up` may be called by several threads; `matcher` by the engine's alone, of what was prepared."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._made: XGrammars | None = None
        self._making = threading.Lock()

    def prepare(self, spec: GrammarSpec) -> Compiled:
        return self._get().prepare(spec)

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int | None = None) -> XGrammarMatcher:
        return self._get().matcher(spec, token_ids, max_tokens)

    def warm_up(self) -> None:
        self._get().warm_up()

    def _get(self) -> XGrammars:
        with self._making:
            if self._made is None:
                from stoker.engine.process.grammars.compiler import XGrammars

                trials = GrammarTrials(self._folder, self._vocab_size)
                self._made = XGrammars(Tokenizer.from_folder(self._folder), self._vocab_size, trials)
            return self._made
