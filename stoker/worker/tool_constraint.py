"""The grammar of an answer to a request with tools: a forced call, a call or the client's format, or text with strict calls."""

from __future__ import annotations

from stoker.base.errors import InvalidRequest
from stoker.text.parsers import grammar
from stoker.text.parsers.contract import ReasoningParser
from stoker.text.tools import ToolPlan
from stoker.worker.constraint import Constraint
from stoker.worker.context import ModelText


def check_forced_call(wanted: Constraint | None, tools: ToolPlan) -> None:
    """Refuse a request that forces a tool call and also constrains the text of the answer."""
    if tools.forced and wanted is not None:
        raise InvalidRequest(
            f"'{wanted.param}' constrains the answer's text, but 'tool_choice' forces a tool call.",
            param=wanted.param.partition(".")[0],
        )


def answer_constraint(
    text: ModelText,
    wanted: Constraint | None,
    tools: ToolPlan,
    reasoning: type[ReasoningParser] | None,
    starts_inside: bool,
) -> Constraint | None:
    """Return the grammar of the answer, in the model's format for tool calls. None: the answer is free.

    `wanted` is what the client wants the text to match. `reasoning` is the parser of an answer that may begin with reasoning.
    """
    parser, parallel = text.tool_parser, tools.parallel
    allows_text = False
    if tools.forced:
        answer, param = parser.calls(tools.callable, parallel=parallel), "tools"
    elif wanted is not None and tools.mode == "auto":
        calls = parser.calls(tools.callable, parallel=parallel)
        answer, param = grammar.either(calls, grammar.format_of(wanted.grammar)), wanted.param
    elif wanted is not None:
        if reasoning is None:
            return wanted
        answer, param = grammar.format_of(wanted.grammar), wanted.param
    elif tools.holds_calls:
        answer, param, allows_text = parser.text_and_calls(tools.held, parallel=parallel), "tools", True
    else:
        return None
    if reasoning is not None:
        answer, allows_text = reasoning.before(answer, starts_inside), True
    return Constraint(grammar.structural_tag(answer, allows_text=allows_text), param)
