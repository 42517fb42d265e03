"""The generating part of `structured_output`: prompts, grammars and tool parsers are the worker's own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jsonschema

from bench.engine.structured_output import GrammarCase, GrammarOutcomes
from stoker.base.config import EngineSettings
from stoker.base.errors import InvalidRequest
from stoker.engine.llm import LLM, LLMOutput
from stoker.engine.model_identity import read_hf_config
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.models.family import family_of
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.decode import decode
from stoker.sched.request import GrammarSpec, SamplingParams
from stoker.text.conversation import Conversation
from stoker.text.openai_messages import template_messages
from stoker.text.parsers.contract import ToolArgumentsDelta, ToolCallStart
from stoker.text.tools import chat_tools
from stoker.worker.constraint import resolve_constraint
from stoker.worker.context import ModelText
from stoker.worker.prompts import render
from stoker.worker.sampling import ModelLimits
from stoker.worker.tool_constraint import answer_constraint


class StructuredGenerator:
    """Generates one answer for each case and validates it."""

    def __init__(self, folder: Path, max_tokens: int, temperature: float, settings: EngineSettings) -> None:
        self._text = ModelText.from_folder(folder)
        vocab_size = family_of(read_hf_config(folder), str(folder)).shape.vocab_size
        self._grammars = XGrammars(self._text.tokenizer, vocab_size)
        self._llm = LLM(folder, settings, grammars=self._grammars)
        self._limits = ModelLimits(vocab_size, self._llm.built.max_model_tokens, self._text.tokenizer.eos_token_ids)
        self._max_tokens = max_tokens
        self._temperature = temperature

    def run(self, name: str, cases: Sequence[GrammarCase], batch: int) -> Iterator[GrammarOutcomes]:
        """Yield the outcomes so far after each batch."""
        outcomes = GrammarOutcomes(total=len(cases))
        started_s = time.monotonic()
        for first in range(0, len(cases), batch):
            ready = []
            for case in cases[first : first + batch]:
                try:
                    ready.append((case, *self._prepared(case)))
                except InvalidRequest as error:
                    outcomes.unsupported[error.message] = outcomes.unsupported.get(error.message, 0) + 1
            sampling = [
                SamplingParams(
                    temperature=self._temperature, grammar=spec, stop_token_ids=tuple(self._limits.eos_token_ids)
                )
                for _, _, spec in ready
            ]
            done = self._llm.generate([prompt for _, prompt, _ in ready], sampling, self._max_tokens)
            for (case, _, _), completion in zip(ready, done, strict=True):
                self._judge(case, completion, outcomes)
            outcomes.seconds = time.monotonic() - started_s
            _progress(name, min(first + batch, len(cases)), outcomes)
            yield outcomes

    def _prepared(self, case: GrammarCase) -> tuple[list[int], GrammarSpec]:
        request = decode(ChatRequest, json.dumps(case.body).encode())
        tools = chat_tools(request, max_tools=128)
        wanted = resolve_constraint(request, request.response_format)
        constraint = answer_constraint(self._text, wanted, tools, None, starts_inside=False)
        assert constraint is not None
        self._grammars.prepare(constraint.grammar)
        conversation = Conversation(template_messages(request.messages), tools, {})
        return render(self._text, conversation, self._limits).token_ids, constraint.grammar

    def _judge(self, case: GrammarCase, completion: LLMOutput, outcomes: GrammarOutcomes) -> None:
        outcomes.tokens += len(completion.token_ids)
        text = self._text.tokenizer.decode(completion.token_ids)
        found = {"id": case.id, "schema": case.schema, "output": text}
        assert completion.finish is not None
        if completion.finish.reason != "stop":
            outcomes.truncated.append(found | {"finish": completion.finish.reason})
            return
        try:
            case.validate(text if case.tool is None else self._arguments(case, text))
        except (ValueError, jsonschema.ValidationError) as error:
            outcomes.invalid.append(found | {"error": str(error).splitlines()[0]})
            return
        outcomes.valid += 1

    def _arguments(self, case: GrammarCase, text: str) -> str:
        parser = self._text.tool_parser(case.body["tools"])
        deltas = parser.push(text) + parser.flush()
        names = [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]
        if names != [case.tool]:
            raise ValueError(f"called {names}, not {case.tool}")
        return "".join(delta.text for delta in deltas if isinstance(delta, ToolArgumentsDelta))


def _progress(name: str, done: int, outcomes: GrammarOutcomes) -> None:
    print(
        f"{name}: {done}/{outcomes.total}  valid {outcomes.valid}  unsupported {sum(outcomes.unsupported.values())}  "
        f"invalid {len(outcomes.invalid)}  truncated {len(outcomes.truncated)}  "
        f"{outcomes.tokens} tokens in {outcomes.seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )
