"""The part that all tool parsers share: text between calls, marks on chunk borders, calls given back as text.

A format says which marks begin a call and what comes then, as steps over a buffer. This file knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from stoker.text.parsers.contract import Delta, TextDelta, ToolArgumentsDelta, ToolCallStart, ToolParser
from stoker.text.parsers.json_stream import CallObject
from stoker.text.stops import open_chars

Step = Callable[[], bool]

HEADER_CHARS = 512  # a call's name and marks are shorter; what is longer began like a call and is text
# What began like a call and was none is read again, for a call may begin within it. An answer that is full of such beginnings
# would be read once for each of them: after so many characters read in vain, objects are text.
_IN_VAIN_CHARS = 1 << 19


class StreamingToolParser(ToolParser):
    """A step looks at the buffer and takes from it; it returns False when it needs more text to go on.

    What a step decides must depend on the text alone, never on where a chunk ended.
    """

    openers: ClassVar[tuple[str, ...]]  # marks that begin a call
    section_begins: ClassVar[tuple[str, ...]] = ()  # marks around calls, dropped where they touch one
    section_ends: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self._marks = (*self.openers, *self.section_begins, *self.section_ends)
        self._mark = re.compile("|".join(re.escape(mark) for mark in sorted(self._marks, key=len, reverse=True)))
        self._buffer = ""
        self._step: Step = self._in_text
        self._final = False
        self._out: list[Delta] = []
        self._pending = ""  # white space and section marks: they are dropped if a call follows, else they are text
        self._after_call = False
        self._num_calls = 0
        self._opener = ""
        self._seen = ""  # of the call that has not started yet: what must be given back if it never does

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

    def _begin_call(self) -> Step:
        """The step after an opener."""
        raise NotImplementedError

    def _in_text(self) -> bool:
        found = self._mark.search(self._buffer)
        if found is None:
            held = 0 if self._final else open_chars(self._buffer, self._marks)
            safe = len(self._buffer) - held
            self._say(self._buffer[:safe])
            self._buffer = self._buffer[safe:]
            return False
        self._say(self._buffer[: found.start()])
        self._buffer = self._buffer[found.end() :]
        mark = found.group()
        if mark in self.openers:
            self._opener, self._seen = mark, ""
            self._step = self._begin_call()
        elif mark in self.section_begins:
            self._pending += mark
        elif not self._after_call:
            self._say(mark)
        return True

    def _say(self, text: str) -> None:
        said = text.rstrip()
        if not said:
            self._pending += text
            return
        said, text = self._pending + said, self._pending + text
        self._pending = text[len(said) :]
        self._emit_text(said.lstrip() if self._after_call else said)
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

    def _give_back(self) -> bool:
        """It was no call: its opener is text, and what followed is looked at again."""
        self._say(self._opener)
        self._buffer = self._seen + self._buffer
        self._seen = ""
        self._step = self._in_text
        return True


class ObjectCalls(StreamingToolParser):
    """Formats in which a call is one JSON object with the function's name and its arguments."""

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._object = CallObject()
        self._started = False
        self._in_vain_chars = 0

    def _begin_call(self) -> Step:
        self._object = CallObject()
        self._started = False
        return self._in_object if self._in_vain_chars < _IN_VAIN_CHARS else self._give_back

    def _accepts(self, name: str) -> bool:
        return True

    def _end_object(self) -> Step:
        """The step after a call's object."""
        return self._in_text

    def _in_object(self) -> bool:
        call = self._object
        taken = call.feed(self._buffer)
        if not self._started:
            self._seen += self._buffer[:taken]
        self._buffer = self._buffer[taken:]
        if call.name is not None and not self._started:
            if not self._accepts(call.name):
                return self._no_call()
            if call.streams or call.done:
                self._started = True
                self._start(call.name)
        if self._started:
            self._emit_arguments(call.take_arguments() if call.streams else call.final_arguments())
        if call.done or call.broken or (self._final and not self._buffer):
            if not self._started:
                return self._no_call()
            self._step = self._end_object() if call.done else self._in_text
            return True
        return bool(self._buffer)

    def _no_call(self) -> bool:
        self._in_vain_chars += len(self._seen)
        return self._give_back()


class HeaderCalls(StreamingToolParser):
    """Formats in which a call is a header with the function's name, its arguments, and a mark at the end."""

    call_end: ClassVar[str]
    arguments_trim: ClassVar[str] = " \t\r\n"  # what may stand around the arguments and is not theirs

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._num_argument_chars = 0

    def _begin_call(self) -> Step:
        return self._in_header

    def _read_header(self) -> tuple[int, str, str | None] | None:
        """(length, name, call id) of the header at the buffer's beginning; None: not yet; a length of 0: it is none."""
        raise NotImplementedError

    def _in_header(self) -> bool:
        header = self._read_header()
        if header is None and not self._final:
            return False
        if header is None or header[0] == 0 or not header[1]:
            return self._give_back()
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
