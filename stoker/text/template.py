"""Chat templates: render a conversation and its tools to the text of a prompt.

The model's own template is used if it has one. This module finds templates in the model folder, and chooses one for a request.
The tool-call and reasoning formats are detected by the marks that the parsers declare. It does not know token ids or sampling.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from stoker.base.errors import InvalidRequest, ModelFilesError
from stoker.text.folder import read_object, read_text
from stoker.text.messages import TemplateTraits, prepare, uses_tools, with_early_system
from stoker.text.parsers.contract import REASONING_PARSERS, TOOL_PARSERS, find_format
from stoker.text.tokenizer import Tokenizer

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "default_system"})
_CHATML_SYSTEM = re.compile(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", re.DOTALL)
_LATE = "late-system-message"
_DEFAULT_TOOL_FORMAT = "hermes"  # the format of our own template
# Errors of a template that gets an unexpected conversation. All of them are reported as an invalid request.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class _Compiled:
    source: str
    template: jinja2.Template
    traits: TemplateTraits
    knows_tools: bool


class ChatTemplate:
    """The chat templates of a model. `render` depends only on its arguments, and on the date if a template prints it."""

    def __init__(self, sources: Mapping[str, str], tokenizer: Tokenizer, origin: str = "chat template") -> None:
        """`sources`: the templates by name ("default", "tool_use"). If it is empty, ChatML is used."""
        environment = _environment()
        own_source = (importlib.resources.files("stoker.text") / "templates" / "chatml_tools.jinja").read_text("utf-8")
        ours = _compile(environment, own_source, "chatml_tools.jinja")
        compiled = {name: _compile(environment, source, f"{origin} ({name})") for name, source in sources.items()}
        default = compiled.get("default") or next(iter(compiled.values()), ours)
        self._bos_token = tokenizer.bos_token or ""
        self._eos_token = tokenizer.eos_token or ""
        self._default = default
        # For tools: the model's tool template, its default template if that handles tools, or ours if the model uses ChatML.
        # Other models have never seen our format, so that tools are refused.
        self._with_tools = next(
            (one for one in (compiled.get("tool_use"), default) if one is not None and one.knows_tools),
            ours if "<|im_start|>" in default.source else None,
        )
        texts = "\n".join(one.source for one in compiled.values()) or own_source
        detected = None if self._with_tools is ours else find_format(TOOL_PARSERS, texts, tokenizer.added_tokens)
        self.tool_format = detected or _DEFAULT_TOOL_FORMAT
        self.reasoning_format = find_format(REASONING_PARSERS, texts, tokenizer.added_tokens)
        self._takes_late_system = True
        self._default_system = self._find_default_system()
        self._takes_late_system = self._shows_late_system()

    @classmethod
    def from_folder(cls, path: Path, tokenizer: Tokenizer) -> ChatTemplate:
        return cls(_sources(path), tokenizer, origin=f"chat template of {path}")

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the text of the prompt. `kwargs` (such as `enable_thinking`) are passed to the template."""
        taken = _RESERVED.intersection(kwargs)
        if taken:
            raise InvalidRequest(
                f"Invalid 'chat_template_kwargs': the server sets '{sorted(taken)[0]}' itself; remove it.",
                param="chat_template_kwargs",
            )
        if not self._takes_late_system:
            messages = with_early_system(messages)
        chosen = self._default
        if tools or uses_tools(messages):
            if self._with_tools is None:
                raise InvalidRequest(
                    "This model's chat template does not support tools.", param="tools" if tools else "messages"
                )
            chosen = self._with_tools
        try:
            return chosen.template.render(
                messages=prepare(messages, chosen.traits),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos_token,
                eos_token=self._eos_token,
                default_system=self._default_system,
                **kwargs,
            )
        except _RENDER_ERRORS as refused:
            message = f"the model's chat template cannot render these messages: {type(refused).__name__}: {refused}"
            raise InvalidRequest(message, param="messages") from refused

    def _shows_late_system(self) -> bool:
        """Return True if a system message in mid-conversation becomes part of the prompt. Many templates refuse it."""
        late = {"role": "system", "content": _LATE}
        question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        try:
            return _LATE in self.render([question, answer, late, question])
        except InvalidRequest:
            return False

    def _find_default_system(self) -> str | None:
        # With tools, our template may replace the model's. The default system message of the model's template must be kept.
        self._default_system = None
        try:
            found = _CHATML_SYSTEM.search(self.render([{"role": "user", "content": ""}]))
        except InvalidRequest:
            return None
        return found[1] if found else None


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks training targets. For serving, only its content counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _compile(environment: jinja2.Environment, source: str, origin: str) -> _Compiled:
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        return _Compiled(source, environment.from_string(source), TemplateTraits.of(source), "tools" in names)
    except jinja2.TemplateSyntaxError as broken:
        raise ModelFilesError(f"{origin} is not valid Jinja at line {broken.lineno}: {broken.message}") from broken


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise InvalidRequest(message, param="messages")


def _sources(path: Path) -> dict[str, str]:
    """Return the templates by name. A separate file overrides the same name in a configuration file."""
    sources: dict[str, str] = {}
    for file in (path / "tokenizer_config.json", path / "chat_template.json"):
        found = read_object(file).get("chat_template")
        if isinstance(found, str):
            sources["default"] = found
        elif isinstance(found, list):
            for entry in found:
                if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
                    raise ModelFilesError(f"{file}: an entry of chat_template has no template text")
                sources[str(entry.get("name", "default"))] = entry["template"]
        elif found is not None:
            raise ModelFilesError(f"{file}: chat_template is a {type(found).__name__}, not a string or a list")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = file.read_text(encoding="utf-8")
    alone = read_text(path / "chat_template.jinja")
    if alone is not None:
        sources["default"] = alone
    return sources
