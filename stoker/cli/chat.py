"""`stoker chat`: talk to any OpenAI-compatible server from a terminal, or from a pipe with one prompt per line."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from stoker.cli.word_wrap import Erase, WordWrap

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.loadgen.client import Target
    from stoker.loadgen.session import Message
    from stoker.loadgen.stream import Delta, Record

NAME = "chat"
HELP = "chat with a running server"
DESCRIPTION = """Chat with any OpenAI-compatible server. In a terminal, /help lists the commands, and Ctrl-C stops an answer:
the part that was received stays in the conversation. From a pipe, each line of stdin is one prompt."""

FENCE = '"""'
COMMANDS = f"""/reset  start a new conversation
/exit   end the chat (or Ctrl-D)
/help   show this list
{FENCE}     starts and ends a message of several lines; pasted lines form one message without it
Ctrl-C  stops an answer; the part that was received stays in the conversation"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="Address of the server. Default: %(default)s.")
    parser.add_argument("--model", help="Model name. Default: the first model that the server lists.")
    parser.add_argument("--system", help="System message. Default: none.")
    parser.add_argument("--temperature", type=float, help="Sampling temperature. Default: the server's.")
    parser.add_argument("--max-tokens", type=int, help="Maximum length of an answer. Default: the server's.")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("STOKER_API_KEY"),
        help="API key. Default: the environment variable STOKER_API_KEY.",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, help="Timeout for a complete answer in seconds. Default: %(default)s."
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from stoker.loadgen.client import Target

    key = (args.api_key or "").strip()  # a key read from a file may end with a line break
    headers = {"authorization": f"Bearer {key}"} if key else {}
    target = Target(args.url, headers=headers, timeout_s=args.timeout_s)
    # One event loop for the whole conversation. Ctrl-C during run() cancels the request, which closes its connection.
    with asyncio.Runner() as runner:
        options: dict[str, Any] = {"model": args.model or runner.run(_first_model(target))}
        for name in ("temperature", "max_tokens"):
            if getattr(args, name) is not None:
                options[name] = getattr(args, name)
        system = None if args.system is None else args.system.encode(errors="replace").decode()
        chat = Chat(target, options, system, runner, Console(highlight=False))
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # bytes that are not UTF-8 must not end the conversation
        return _interactive(chat) if sys.stdin.isatty() else _piped(chat)


async def _first_model(target: Target) -> str:
    from stoker.loadgen.client import Client

    async with Client(target) as client:
        return await client.first_model()


class AnswerStopped(KeyboardInterrupt):
    """Ctrl-C stopped an answer. `kept`: a part of it was received, and is now part of the conversation."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept = kept


class Chat:
    """A conversation with a server. Answers are printed as they arrive."""

    def __init__(
        self, target: Target, options: dict[str, Any], system: str | None, runner: asyncio.Runner, console: Console
    ) -> None:
        self.console = console
        self.model = str(options["model"])
        self._target = target
        self._options = options
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._runner = runner
        self._wrap = WordWrap()
        self._received: list[str] = []  # the content of the current answer

    def reset(self) -> None:
        self._messages = list(self._start)

    def ask(self, text: str) -> Record:
        """Send a message and print the answer. After an error, neither of the two becomes part of the conversation.

        If Ctrl-C stops the answer, the part that was received becomes part of the conversation, and AnswerStopped is raised.
        """
        question: Message = {"role": "user", "content": text}
        self._wrap, self._received = WordWrap(), []
        try:
            record = self._runner.run(self._answer([*self._messages, question]))
        except KeyboardInterrupt:
            received = "".join(self._received)
            if received:
                self._messages += [question, {"role": "assistant", "content": received}]
            raise AnswerStopped(kept=bool(received)) from None
        if record.error is None:
            self._messages += [question, {"role": "assistant", "content": record.text}]
        return record

    async def _answer(self, messages: list[Message]) -> Record:
        from stoker.loadgen.client import Client
        from stoker.loadgen.session import Messages, Turn

        turn = Turn(Messages(messages, len(messages)), session="chat")
        async with Client(self._target) as client:
            return await client.send(turn, self._options, on_delta=self._show)

    def _show(self, delta: Delta) -> None:
        if delta.reasoning_content:
            self._write(delta.reasoning_content, "dim")
        if delta.content:
            self._received.append(delta.content)
            self._write(delta.content)
        for call in delta.tool_calls or ():
            self._write(bytes(call).decode() + "\n", "dim")

    def _write(self, text: str, style: str | None = None) -> None:
        pieces = self._wrap.feed(text, self.console.width) if self.console.is_terminal else [text]
        for piece in pieces:
            if isinstance(piece, Erase):
                self.console.file.write(f"\x1b[{piece.cells}D\x1b[K")  # cursor left, erase to the end of the line
            else:
                self.console.print(piece, style=style, end="", markup=False, soft_wrap=True)


def summary(record: Record) -> str:
    """Return one line such as `42 tokens · 118 of 160 prompt tokens cached · first token after 90 ms · 35.1 tokens/s`."""
    parts = [f"{record.completion_tokens} tokens"]
    if record.cached_tokens is not None:
        parts.append(f"{record.cached_tokens} of {record.prompt_tokens} prompt tokens cached")
    elif record.prompt_tokens:
        parts.append(f"{record.prompt_tokens} prompt tokens")
    if record.ttft_s is not None:
        parts.append(f"first token after {record.ttft_s * 1e3:.0f} ms")
    if record.tpot_s:
        parts.append(f"{1 / record.tpot_s:.1f} tokens/s")
    return " · ".join(parts)


def _interactive(chat: Chat) -> int:
    _keep_pasted_lines_together()
    chat.console.print(f"{chat.model}. Type a message, or /help for the list of commands.", style="dim", markup=False)
    while True:
        try:
            text = _read_message()
        except EOFError:
            chat.console.print()
            return 0
        except KeyboardInterrupt:
            chat.console.print()
            continue
        match text.strip():
            case "":
                continue
            case "/exit":
                return 0
            case "/reset":
                chat.reset()
            case "/help":
                chat.console.print(COMMANDS, style="dim", markup=False)
            case _:
                _ask_and_report(chat, text)


def _ask_and_report(chat: Chat, text: str) -> None:
    try:
        record = chat.ask(text)
    except AnswerStopped as stopped:
        kept = "the answer so far stays in the conversation" if stopped.kept else "nothing was received yet"
        chat.console.print(f"\n(stopped: {kept})", style="dim")
        return
    chat.console.print()
    if record.error is None:
        chat.console.print(summary(record), style="dim", markup=False)
    else:
        chat.console.print(f"{record.error}: {record.error_message}", style="red", markup=False)


def _read_message() -> str:
    line = input("> ")
    if not line.lstrip().startswith(FENCE):
        return line
    lines = [line.lstrip().removeprefix(FENCE)]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(input(". "))
    lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    return "\n".join(lines)


def _keep_pasted_lines_together() -> None:
    try:
        import readline
    except ImportError:  # input() works without it, line by line
        return
    readline.parse_and_bind("set enable-bracketed-paste on")


def _piped(chat: Chat) -> int:
    from stoker.base.errors import StokerError

    for line in sys.stdin:
        text = line.strip()
        if text == "/exit":
            break
        if text == "/reset":
            chat.reset()
        elif text:
            record = chat.ask(text)
            chat.console.print()
            if record.error is not None:
                raise StokerError(f"{record.error}: {record.error_message}", code="answer_failed")
    return 0
