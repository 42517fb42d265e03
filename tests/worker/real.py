"""`stoker serve` as a process on a real socket, with a model that is small enough to start in seconds."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import torch
from safetensors.torch import save_file
from signing import signed
from sse_reader import SseEvent, SseReader

STOKER = str(Path(sys.executable).parent / "stoker")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_HIDDEN, _MIDDLE, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 32, 64, 2, 4, 2, 8


def make_tiny_folder(folder: Path, tokenizer: Path, max_positions: int = 8192) -> Path:
    """A model of random weights with a real tokenizer: its text is noise, but the same noise for the same tokens."""
    config = json.loads((tokenizer / "config.json").read_text())
    config.pop("quantization_config", None)
    vocab_size = config["vocab_size"]
    config |= {
        "hidden_size": _HIDDEN,
        "intermediate_size": _MIDDLE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": max_positions,
    }
    shapes = {"model.embed_tokens.weight": (vocab_size, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (_HEADS * _HEAD_DIM, _HIDDEN),
            f"{at}.self_attn.k_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{at}.self_attn.v_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{at}.self_attn.o_proj.weight": (_HIDDEN, _HEADS * _HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": (_MIDDLE, _HIDDEN),
            f"{at}.mlp.up_proj.weight": (_MIDDLE, _HIDDEN),
            f"{at}.mlp.down_proj.weight": (_HIDDEN, _MIDDLE),
            f"{at}.input_layernorm.weight": (_HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (_HIDDEN,),
        }
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    # Large enough that the next token depends on all tokens before it.
    weights = {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, folder / name)
    return folder


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]  # type: ignore[no-any-return]

    @property
    def text(self) -> str:
        """Return the text of an answer to COMPLETIONS."""
        assert self.status == 200, self.body
        return self.json["choices"][0]["text"]  # type: ignore[no-any-return]


@dataclass
class Stream:
    """A streamed answer that a thread reads as it arrives."""

    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    events: list[SseEvent] = field(default_factory=list)
    ended_s: float | None = None
    _socket: socket.socket = field(init=False)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        assert self.connection.sock is not None, "a stream's end is not known before its connection ends"
        self._socket = self.connection.sock
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        reader = SseReader()
        with suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            while part := self.response.read1(1 << 16):
                self.events += reader.push(part)
        self.ended_s = time.monotonic()
        self.response.close()
        self.connection.close()

    @property
    def text(self) -> str:
        """Return the text of a stream from COMPLETIONS."""
        chunks = [json.loads(event.data) for event in self.events if not event.is_done]
        return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))

    @property
    def is_done(self) -> bool:
        return any(event.is_done for event in self.events)

    @property
    def last_error(self) -> dict[str, Any]:
        return json.loads(self.events[-1].data)["error"]  # type: ignore[no-any-return]

    def wait_end(self, timeout_s: float = 60.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream has no end"

    def leave(self) -> None:
        """Disconnect like a client that vanishes."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.wait_end()


@dataclass
class RealServer:
    process: subprocess.Popen[str]
    log_path: Path
    url: str
    model: str
    secret: str | None = None  # signs the requests

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def engine_pid(self) -> int:
        (pid,) = children(self.process.pid)
        return pid

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120, **options)

    def send(self, path: str, body: Any = None, timeout_s: float = 120.0) -> Answer:
        """Send `body` as it is if it is bytes, else as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | signed(self.url, self.secret, path, data)
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return Answer(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as refused:
            with refused:
                return Answer(refused.code, dict(refused.headers), refused.read())

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return self.send(COMPLETIONS, {"model": self.model, "prompt": prompt} | fields)

    def stream(self, path: str, body: dict[str, Any]) -> Stream:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = json.dumps({"stream": True} | body).encode()
        headers = {"Content-Type": "application/json"} | signed(self.url, self.secret, path, data)
        connection.request("POST", path, data, headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return Stream(connection, response)

    def metrics(self) -> dict[str, float]:
        lines = self.send("/metrics").body.decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    @property
    def is_idle(self) -> bool:
        """Return True if nothing runs or waits and every block is free."""
        values = self.metrics()
        nothing = ("stoker_running_requests", "stoker_running_sequences", "stoker_waiting_sequences")
        return (
            "stoker_kv_blocks" in values  # a new engine has not reported yet
            and not any(values[name] for name in nothing)
            and values["stoker_kv_blocks_free"] == values["stoker_kv_blocks"]
        )

    @property
    def is_ready(self) -> bool:
        return self.send("/ready").status == 200


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> float:
    """Wait until the condition holds and return the seconds. The timeout is long because machines may stall."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, "the condition never held"
        time.sleep(0.01)
    return time.monotonic() - started_s


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def is_alive(pid: int) -> bool:
    """Return True if the process runs. A zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@contextmanager
def serving_together(folder: Path, *starts: tuple[Path, tuple[str, ...]]) -> Iterator[list[RealServer]]:
    """Start several servers at the same time, each with a log and options: a start is mostly imports on one core."""
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(starts)) as threads:
            begun = [threads.submit(stack.enter_context, serving(folder, log, *options)) for log, options in starts]
        yield [one.result() for one in begun]


@contextmanager
def serving(folder: Path | None, log_path: Path, *options: str, start_s: float = 120.0) -> Iterator[RealServer]:
    """A server that accepts requests. It and its engine are ended, whatever the test did to them."""
    command = [STOKER, "serve", *([str(folder)] if folder else []), "--port", "0", *options]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        watchdog = threading.Timer(start_s, process.kill)
        watchdog.start()
        url = model = ""
        for line in process.stdout:
            if found := re.search(r"(http://\S+?)/v1/", line):
                url = found[1]
            # A worker with a secret prints no command to try, but one line with its name and URL.
            if found := re.search(r'"model": "([^"]+)"|^Serving (\S+) on .*/v1/', line):
                model = found[1] or found[2]
                break
        watchdog.cancel()
        assert url, log_path.read_text()
        yield RealServer(process, log_path, url, model)
    finally:
        engines = children(process.pid) if process.poll() is None else []
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        for pid in engines:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
