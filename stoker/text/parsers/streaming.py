"""Base classes of the tool parsers: text between calls, marks across chunk borders, and text that is not a call after all.

A format defines the marks that start a call, and the steps that read the call from a buffer. This module knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from stoker.text.parsers import grammar
from stoker.text.parsers.contract import Delta, TextDelta, ToolArgumentsDelta, ToolCallStart, ToolParser
from stoker.text.parsers.json_stream import CallObject
from stoker.text.stops import open_chars

Step = Callable[[], bool]

HEADER_CHARS = 512  # maximum length of a call's name and marks; a longer header is text
# Text that only looked like the start of a call is read again, because a call may start inside it. An answer with many such starts
# would be read many times. After this number of characters that were read twice, objects are text.
_MAX_REREAD_CHARS = 1 << 19


class StreamingToolParser(ToolParser):
    """Runs steps over a buffer. A step consumes text from the buffer, and returns False if it needs more text.

    A step must depend only on the text, never on the chunk borders.
    """

    openers: ClassVar[tuple[str, ...]]  # marks that start a call
    section_begins: ClassVar[tuple[str, ...]] = ()  # marks around calls, which are dropped next to a call
    section_ends: ClassVar[tuple[str, ...]] = ()
    section_gap: ClassVar[str] = ""  # white space after the mark that begins a section, and before the one that ends it
    separator: ClassVar[str] = ""  # between two calls
    not_in_text: ClassVar[tuple[str, ...]] = ()  # what free text must not contain if calls are held to their schema

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self._marks = (*self.openers, *self.section_begins, *self.section_ends)
        self._mark = re.compile("|".join(re.escape(mark) for mark in sorted(self._marks, key=len, reverse=True)))
        self._buffer = ""
        self._step: Step = self._in_text
        self._final = False
        self._out: list[Delta] = []
        self._pending = ""  # white space and section marks: dropped if a call follows, otherwise text
        self._after_call = False
        self._num_calls = 0
        self._opener = ""
        self._seen = ""  # text of a call that has not started yet; it becomes text if the call never starts

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        return self._run()

    def flush(self) -> list[Delta]:
        self._final = True
        return self._run()

    def _run(self) -> list[Delta]:
        while self._step():
            pass
        if self._final and not self._after_call:
            self._emit_text(self._pending)
            self._pending = ""
        out, self._out = self._out, []
        return out

    @classmethod
    def call_tags(cls, tools: list[dict[str, Any]]) -> list[grammar.Format]:
        """Return a tag for a call to each tool. It begins with an opening mark."""
        raise NotImplementedError

    @classmethod
    def calls(cls, tools: list[dict[str, Any]], *, parallel: bool) -> grammar.Format:
        calls = grammar.calls(cls.call_tags(tools), cls.separator, parallel)
        if not cls.section_begins:
            return calls
        return grammar.sequence(grammar.const(cls._section_begin()), calls, grammar.const(cls._section_end()))

    @classmethod
    def text_and_calls(cls, tools: list[dict[str, Any]], *, parallel: bool) -> grammar.Format:
        tags = cls.call_tags(tools)
        if not cls.section_begins:
            return grammar.triggered(cls.openers, tags, cls.not_in_text, parallel)
        calls = grammar.calls(tags, cls.separator, parallel)
        section = grammar.tag(cls._section_begin(), calls, cls._section_end())
        return grammar.triggered(cls.section_begins, [section], cls.openers, parallel)

    @classmethod
    def _section_begin(cls) -> str:
        return cls.section_begins[0] + cls.section_gap

    @classmethod
    def _section_end(cls) -> str:
        return cls.section_gap + cls.section_ends[0]

    def _begin_call(self) -> Step:
        """Return the step that follows an opening mark."""
        raise NotImplementedError

    def _in_text(self) -> bool:
        found = self._mark.search(self._buffer)
        if found is None:
            held = 0 if self._final else open_chars(self._buffer, self._marks)
            safe = len(self._buffer) - held
            self._add_text(self._buffer[:safe])
            self._buffer = self._buffer[safe:]
            return False
        self._add_text(self._buffer[: found.start()])
        self._buffer = self._buffer[found.end() :]
        mark = found.group()
        if mark in self.openers:
            self._opener, self._seen = mark, ""
            self._step = self._begin_call()
        elif mark in self.section_begins:
            self._pending += mark
        elif not self._after_call:
            self._add_text(mark)
        return True

    def _add_text(self, text: str) -> None:
        """Emit text outside of calls. White space at its end is held back, because a call may follow."""
        stripped = text.rstrip()
        if not stripped:
            self._pending += text
            return
        stripped, text = self._pending + stripped, self._pending + text
        self._pending = text[len(stripped) :]
        self._emit_text(stripped.lstrip() if self._after_call else stripped)
        self._after_call = False

    def _emit_text(self, text: str) -> None:
        if not text:
            return
        if self._out and isinstance(last := self._out[-1], TextDelta):
            self._out[-1] = TextDelta(last.text + text)
        else:
            self._out.append(TextDelta(text))

    def _start(self, name: str, call_id: str = "") -> None:
        self._out.append(ToolCallStart(self._num_calls, call_id, name))
        self._num_calls += 1
        self._pending = self._seen = ""
        self._after_call = True

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._out.append(ToolArgumentsDelta(self._num_calls - 1, text))

    def _not_a_call(self) -> bool:
        """The text was not a call: its opening mark is text, and the text after it is parsed again."""
        self._add_text(self._opener)
        self._buffer = self._seen + self._buffer
        self._seen = ""
        self._step = self._in_text
        return True


class ObjectCalls(StreamingToolParser):
    """Base of formats in which a call is one JSON object with the function's name and arguments."""

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._object = CallObject()
        self._started = False
        self._reread_chars = 0

    def _begin_call(self) -> Step:
        self._object = CallObject()
        self._started = False
        return self._in_object if self._reread_chars < _MAX_REREAD_CHARS else self._not_a_call

    def _accepts(self, name: str) -> bool:
        return True

    def _end_object(self) -> Step:
        """Return the step that follows the object of a call."""
        return self._in_text

    def _in_object(self) -> bool:
        call = self._object
        taken = call.feed(self._buffer)
        if not self._started:
            self._seen += self._buffer[:taken]
        self._buffer = self._buffer[taken:]
        if call.name is not None and not self._started:
            if not self._accepts(call.name):
                return self._reject()
            if call.streams or call.done:
                self._started = True
                self._start(call.name)
        if self._started:
            self._emit_arguments(call.take_arguments() if call.streams else call.final_arguments())
        if call.done or call.broken or (self._final and not self._buffer):
            if not self._started:
                return self._reject()
            self._step = self._end_object() if call.done else self._in_text
            return True
        return bool(self._buffer)

    def _reject(self) -> bool:
        self._reread_chars += len(self._seen)
        return self._not_a_call()


class HeaderCalls(StreamingToolParser):
    """Base of formats in which a call is a header with the function's name, the arguments, and an end mark."""

    call_end: ClassVar[str]
    arguments_trim: ClassVar[str] = " \t\r\n"  # characters around the arguments that do not belong to them

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._num_argument_chars = 0

    def _begin_call(self) -> Step:
        return self._in_header

    def _read_header(self) -> tuple[int, str, str | None] | None:
        """Return (length, name, call id) of the header at the start of the buffer. None: incomplete. Length 0: not a header."""
        raise NotImplementedError

    def _in_header(self) -> bool:
        header = self._read_header()
        if header is None and not self._final:
            return False
        if header is None or header[0] == 0 or not header[1]:
            return self._not_a_call()
        length, name, call_id = header
        self._buffer = self._buffer[length:]
        self._start(name, call_id or "")
        self._num_argument_chars = 0
        self._step = self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        if self._num_argument_chars == 0:
            self._buffer = self._buffer.lstrip(self.arguments_trim)
        end = self._buffer.find(self.call_end)
        held = 0 if end >= 0 or self._final else open_chars(self._buffer, (self.call_end,))
        body = self._buffer[: end if end >= 0 else len(self._buffer) - held].rstrip(self.arguments_trim)
        self._num_argument_chars += len(body)
        self._emit_arguments(body)
        if end < 0 and not self._final:
            self._buffer = self._buffer[len(body) :]
            return False
        if end >= 0 and self._num_argument_chars == 0:
            self._emit_arguments("{}")
        self._buffer = self._buffer[end + len(self.call_end) :] if end >= 0 else ""
        self._step = self._in_text
        return True
