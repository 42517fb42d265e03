"""LazyGrammars: creates the engine's grammars on first use.

Importing xgrammar and reading the vocabulary take half as long as importing torch. The engine's start does not wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.engine.grammar import Matcher
from stoker.engine.process.grammars.trials import GrammarTrials
from stoker.sched.request import GrammarSpec
from stoker.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from stoker.engine.process.grammars.compiler import XGrammars
    from stoker.engine.process.grammars.matcher import PreparedGrammar


class LazyGrammars:
    """`prepare` and `warm_up` can be called from several threads, `matcher` and `forced_start` only from the engine's
    thread."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._grammars: XGrammars | None = None
        self._lock = threading.Lock()

    def prepare(self, spec: GrammarSpec) -> PreparedGrammar:
        return self._get().prepare(spec)

    def matcher(self, spec: GrammarSpec, token_ids: Sequence[int], max_tokens: int | None = None) -> Matcher:
        return self._get().matcher(spec, token_ids, max_tokens)

    def forced_start(self, spec: GrammarSpec) -> Sequence[int]:
        return self._get().forced_start(spec)

    def warm_up(self) -> None:
        self._get().warm_up()

    def _get(self) -> XGrammars:
        with self._lock:
            if self._grammars is None:
                from stoker.engine.process.grammars.compiler import XGrammars

                trials = GrammarTrials(self._folder, self._vocab_size)
                self._grammars = XGrammars(Tokenizer.from_folder(self._folder), self._vocab_size, trials)
            return self._grammars
