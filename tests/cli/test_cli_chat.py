from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import CUT, Reply, ScriptedServer, answer, delta, failure, finish

from stoker.cli.main import main


def contents(server: ScriptedServer, number: int) -> list[str]:
    return [message["content"] for message in server.seen[number].body["messages"]]


def piped(monkeypatch: pytest.MonkeyPatch, server_url: str, lines: str, *argv: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", "--url", server_url, *argv])


def test_each_line_of_a_pipe_is_a_prompt_and_answers_are_plain(server: ScriptedServer, monkeypatch, capsys):
    argv = ["--system", "Be brief.", "--temperature", "0.5", "--max-tokens", "9", "--api-key", "k"]
    assert piped(monkeypatch, server.url, "one\n\ntwo\n/reset\nthree\n/exit\nfour\n", *argv) == 0
    assert capsys.readouterr().out == "Hello there.\n" * 3
    assert contents(server, 0) == ["Be brief.", "one"]
    assert contents(server, 1) == ["Be brief.", "one", "Hello there.", "two"]
    assert contents(server, 2) == ["Be brief.", "three"]
    assert len(server.seen) == 3
    body = server.seen[0].body
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("scripted", 0.5, 9)
    assert server.seen[0].headers["Authorization"] == "Bearer k"


def test_a_server_that_does_not_answer_is_named(unused_url: str, monkeypatch, capsys):
    assert piped(monkeypatch, unused_url, "hello\n") == 2
    assert capsys.readouterr().err.startswith(f"stoker: no server answers at {unused_url}")


def test_an_error_ends_a_pipe(server: ScriptedServer, monkeypatch, capsys):
    server.script = lambda seen: failure(429, "overloaded", "too many")
    assert piped(monkeypatch, server.url, "hello\n") == 2
    assert capsys.readouterr().err == "stoker: 429 overloaded: too many\n"


def test_bytes_that_are_not_utf8_do_not_end_the_conversation(server: ScriptedServer):
    argv = ["--url", server.url, "--system", b"caf\xe9", "--api-key", "k\r"]
    command = [sys.executable, "-m", "stoker.cli.main", "chat", *argv]
    done = subprocess.run(
        command, input=b"na\xefve\nbye\n", capture_output=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello there.\n" * 2, b"")
    assert contents(server, 1) == ["caf?", "na\ufffdve", "Hello there.", "bye"]
    assert server.seen[0].headers["Authorization"] == "Bearer k"


LONG_S = 60.0  # a deadline for events that take about a second


class Terminal:
    """`stoker chat` on a pseudo-terminal."""

    def __init__(self, url: str, columns: int = 200) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stoker.cli.main", "chat", "--url", url],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)},
        )
        os.close(slave)
        self._readable = select.poll()
        self._readable.register(self._master, select.POLLIN)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, text: str, times: int = 1) -> None:
        deadline_s = time.monotonic() + LONG_S
        while self.shown.count(text) < times:
            assert time.monotonic() < deadline_s, f"{text!r} never came: {self.shown!r}"
            if self._readable.poll(100):
                try:
                    self.shown += os.read(self._master, 65536).decode(errors="replace")
                except OSError:  # the process has closed its side
                    break
        assert self.shown.count(text) >= times, self.shown

    def listens(self) -> None:
        """Wait until the process sleeps at its prompt. It shows the prompt a moment before it handles Ctrl-C."""
        num_asleep, deadline_s = 0, time.monotonic() + LONG_S
        while num_asleep < 20:
            assert time.monotonic() < deadline_s, f"it never slept: {self.shown!r}"
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            num_asleep = num_asleep + 1 if state == "S" else 0
            time.sleep(0.01)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(server: ScriptedServer) -> Iterator[Terminal]:
    started = Terminal(server.url)
    started.wait_for("> ")
    yield started
    started.close()


def test_answers_come_with_token_counts_and_dim_reasoning(server: ScriptedServer, terminal: Terminal):
    server.script = lambda seen: Reply(
        [delta(reasoning_content="hmm"), delta(content="[b]Hi"), 0.05, delta(content=" you"), *finish(12, 3, 8)]
    )
    terminal.type("hello\n")
    terminal.wait_for("8 of 12 prompt tokens cached")
    assert "[b]Hi you" in terminal.shown  # brackets in an answer are not markup
    assert "\x1b[2mhmm" in terminal.shown
    assert "3 tokens" in terminal.shown
    assert "tokens/s" in terminal.shown
    terminal.wait_for("> ", times=2)
    terminal.type("\x04")
    assert terminal.process.wait(LONG_S) == 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(server: ScriptedServer, terminal: Terminal):
    server.script = lambda seen: Reply([delta(content="Well, "), delta(content="thinking"), 600.0])
    terminal.type("hello\n")
    terminal.wait_for("thinking")
    terminal.interrupt()
    terminal.wait_for("(stopped: the answer so far stays in the conversation)")
    deadline_s = time.monotonic() + LONG_S
    while not server.dropped and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert server.dropped == 1
    server.script = lambda seen: answer("fine", " again")
    terminal.wait_for("> ", times=2)
    terminal.listens()
    terminal.interrupt()  # at the prompt it only starts a new line
    terminal.wait_for("> ", times=3)
    terminal.type("and now?\n")
    terminal.wait_for("fine again")
    assert contents(server, 1) == ["hello", "Well, thinking", "and now?"]
    terminal.wait_for("> ", times=4)
    terminal.type("/exit\n")
    assert terminal.process.wait(LONG_S) == 0


def test_a_turn_that_is_stopped_before_its_answer_is_dropped(server: ScriptedServer, terminal: Terminal):
    server.script = lambda seen: Reply([600.0])
    terminal.type("hello\n")
    deadline_s = time.monotonic() + LONG_S
    while not server.seen and time.monotonic() < deadline_s:
        time.sleep(0.02)
    terminal.interrupt()
    terminal.wait_for("(stopped: nothing was received yet)")
    server.script = lambda seen: answer("fine")
    terminal.wait_for("> ", times=2)
    terminal.type("and now?\n")
    terminal.wait_for("fine")
    assert contents(server, 1) == ["and now?"]


CONTROL = re.compile(r"\x1b\[(\d*)([A-Za-z])")


def screen(shown: str) -> list[str]:
    """The lines of a terminal after it has shown this text: it moves the cursor left and erases, and ignores colours."""
    lines, column, at = [""], 0, 0
    while at < len(shown):
        control = CONTROL.match(shown, at)
        if control is None:
            character = shown[at]
            if character == "\n":
                lines.append("")
            elif character == "\r":
                column = 0
            else:
                lines[-1] = lines[-1][:column] + character + lines[-1][column + 1 :]
                column += 1
            at += 1
            continue
        if control[2] == "D":
            column -= int(control[1] or 1)
        elif control[2] == "K":
            lines[-1] = lines[-1][:column]
        at = control.end()
    return lines


def test_words_are_wrapped_at_the_width_of_the_terminal(server: ScriptedServer):
    pieces = ["Some", " words", " are", " split", " in", "to", " pie", "ces", ", and", " " + "x" * 45, "\n  ok"]
    server.script = lambda seen: Reply([*(delta(content=piece) for piece in pieces), *finish(12, 11)])
    terminal = Terminal(server.url, columns=20)
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("prompt tokens")
    lines = [line.rstrip() for line in screen(terminal.shown)]
    terminal.close()
    first = lines.index("Some words are")
    # A word that is longer than a line starts where it is and is broken at the border.
    assert lines[first : first + 6] == [
        "Some words are",
        "split into pieces,",
        "and " + "x" * 15,
        "x" * 19,
        "x" * 11,
        "  ok",
    ]


def test_several_lines_are_one_message(server: ScriptedServer, terminal: Terminal):
    terminal.type("\x1b[200~one\ntwo\x1b[201~\n")
    terminal.wait_for("Hello there.")
    terminal.wait_for("prompt tokens cached")
    terminal.type('"""three\nfour"""\n')
    terminal.wait_for("Hello there.", times=2)
    assert contents(server, 0) == ["one\ntwo"]
    assert contents(server, 1)[-1] == "three\nfour"


def test_errors_do_not_end_the_chat(server: ScriptedServer, terminal: Terminal):
    server.script = lambda seen: failure(503, "overloaded", "try later")
    terminal.type("hello\n")
    terminal.wait_for("503 overloaded: try later")
    server.script = lambda seen: Reply([delta(content="half"), 0.05, CUT])
    terminal.type("hello\n")
    terminal.wait_for("disconnected")
    server.script = lambda seen: answer("fine")
    terminal.type("hello\n")
    terminal.wait_for("fine")
    assert contents(server, 2) == ["hello"]
