"""The sampling part of `tool_calls`: prompts, grammars and tool parsers are the worker's own."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from bench.engine.structured_output import bfcl_cases
from bench.engine.tool_calls import CallOutcomes
from bench.support.apply_patch import GRAMMAR, is_patch
from stoker.base.config import EngineSettings
from stoker.base.ids import RequestId
from stoker.engine.build import read_hf_config
from stoker.engine.llm import LLM, LLMOutput
from stoker.engine.process.grammars.compiler import XGrammars
from stoker.models.family import family_of
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.decode import decode
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.text.conversation import Conversation
from stoker.text.openai_messages import template_messages
from stoker.text.parsers.contract import ToolArgumentsDelta, ToolCallStart
from stoker.text.tools import chat_tools
from stoker.worker.context import ModelText
from stoker.worker.prompts import render
from stoker.worker.sampling import ModelLimits
from stoker.worker.tool_constraint import answer_constraint

_TEMPERATURES = (0.6, 0.8, 1.0, 1.15, 1.3)
_TOOLS_PER_REQUEST = 3
_OPENING = "<tool_call>"
_PATCH_TASKS = ("Add a file with a greeting.", "Rename the function f to g.", "Delete the old tests.", "Fix the loop.")


@dataclass(frozen=True, slots=True)
class _CallCase:
    body: dict[str, Any]
    schemas: dict[str, Any]  # by the name of the tool
    begun: str = ""  # what the answer begins with


class CallSampler:
    """Samples answers with tool calls and judges each call."""

    def __init__(self, folder: Path, data: Path, max_tokens: int, settings: EngineSettings) -> None:
        self._text = ModelText.from_folder(folder)
        vocab_size = family_of(read_hf_config(folder), str(folder)).shape.vocab_size
        self._grammars = XGrammars(self._text.tokenizer, vocab_size)
        self._llm = LLM(folder, settings, grammars=self._grammars)
        self._limits = ModelLimits(vocab_size, self._llm.built.max_model_tokens, self._text.tokenizer.eos_token_ids)
        self._data = data
        self._max_tokens = max_tokens

    def run(self, name: str, limit: int, batch: int) -> CallOutcomes:
        cases = list(
            itertools.islice(_patch_cases() if name == "patch" else self._bfcl(name == "strict", limit), limit)
        )
        outcomes = CallOutcomes()
        started_s = time.monotonic()
        for first in range(0, len(cases), batch):
            together = cases[first : first + batch]
            requests = [self._request(case, name, first + i) for i, case in enumerate(together)]
            for case, request, done in zip(together, requests, self._llm.run(requests), strict=True):
                written = request.token_ids[request.num_prompt :] + done.token_ids
                self._judge(case, written, done, outcomes)
            outcomes.seconds = time.monotonic() - started_s
            print(
                f"{name}: {first + len(together)}/{len(cases)}  calls {outcomes.calls}  fit {outcomes.valid}  "
                f"invalid {len(outcomes.invalid)}  cut off {outcomes.cut_off}  {outcomes.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        return outcomes

    def _bfcl(self, strict: bool, limit: int) -> Iterator[_CallCase]:
        """Yield cases with some neighbouring functions, spread over the whole set."""
        found = bfcl_cases(self._data)
        step = max(1, len(found) // limit)
        for first in range(0, len(found) - _TOOLS_PER_REQUEST, step):
            some = {case.tool: case for case in found[first : first + _TOOLS_PER_REQUEST] if case.tool is not None}
            tools = [
                {"type": "function", "function": case.body["tools"][0]["function"] | {"strict": strict}}
                for case in some.values()
            ]
            body = {"model": "m", "messages": found[first].body["messages"], "tools": tools}
            yield _CallCase(body, {name: case.schema for name, case in some.items()}, _OPENING)

    def _request(self, case: _CallCase, name: str, number: int) -> GenerateRequest:
        body = decode(ChatRequest, json.dumps(case.body).encode())
        tools = chat_tools(body, max_tools=128)
        constraint = answer_constraint(self._text, None, tools, None, starts_inside=False)
        grammar = constraint.grammar if constraint is not None else None
        if grammar is not None:
            self._grammars.prepare(grammar)
        conversation = Conversation(template_messages(body.messages), tools, {})
        prompt = render(self._text, conversation, self._limits).token_ids
        sampling = SamplingParams(
            temperature=_TEMPERATURES[number % len(_TEMPERATURES)],
            seed=number,
            grammar=grammar,
            stop_token_ids=tuple(self._limits.eos_token_ids),
        )
        begun = self._text.tokenizer.encode(case.begun) if case.begun else []
        return GenerateRequest(
            RequestId(f"{name}-{number}"), prompt + begun, len(prompt), sampling, self._max_tokens + len(begun)
        )

    def _judge(self, case: _CallCase, written: list[int], done: LLMOutput, outcomes: CallOutcomes) -> None:
        assert done.finish is not None
        outcomes.answers += 1
        outcomes.tokens += len(done.token_ids)
        text = self._text.tokenizer.decode(written)
        calls: list[tuple[str, str]] = []
        parser = self._text.tool_parser(case.body["tools"])
        for delta in [*parser.push(text), *parser.flush()]:
            if isinstance(delta, ToolCallStart):
                calls.append((delta.name, ""))
            elif isinstance(delta, ToolArgumentsDelta):
                calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
        begun = max(len(calls), text.count(_OPENING))  # of some, not even the name can be read
        outcomes.calls += begun
        is_cut = done.finish.reason == "length"
        for i in range(begun):
            try:
                _check(case, *calls[i])
                outcomes.valid += 1
            except (ValueError, IndexError, KeyError, jsonschema.ValidationError) as error:
                if is_cut and i == begun - 1:
                    outcomes.cut_off += 1
                else:
                    outcomes.invalid.append({"error": str(error).splitlines()[0][:200], "output": text[:400]})


def _check(case: _CallCase, name: str, arguments: str) -> None:
    schema = case.schemas[name]
    value = json.loads(arguments)
    if schema is not None:
        jsonschema.Draft202012Validator(schema).validate(value)
    elif not is_patch(value["input"]):
        raise ValueError("the input is not a patch")


def _patch_cases() -> Iterator[_CallCase]:
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": GRAMMAR}}
    tool = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edits files.", "format": form}}
    choice = {"type": "custom", "custom": {"name": "apply_patch"}}
    for task in itertools.cycle(_PATCH_TASKS):
        messages = [{"role": "user", "content": task}]
        body = {"model": "m", "messages": messages, "tools": [tool], "tool_choice": choice}
        yield _CallCase(body, {"apply_patch": None})
