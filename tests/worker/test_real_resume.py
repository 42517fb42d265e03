"""Resume and KV events on real processes: another worker continues an answer, and subscribers know the blocks."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from real import CHAT, COMPLETIONS, RESPONSES, RealServer, serving, serving_together, wait_for
from resume_notes import Seen, blocks_of, cuts, shown
from signing import signed

from stoker.base.fleet_key import FleetKey
from stoker.cli.main import main
from stoker.kv.blocks.keys import block_keys, root_key
from stoker.proto.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch, read_message
from stoker.proto.messages import WorkerReport
from stoker.proto.signed_http import RequestVerifier
from stoker.text.folder import text_digest

# In float64 the batch does not change a sampled token, so answers can be compared exactly. Without drafts each event has
# one token, so events can be compared, too; test_real_drafts.py resumes streams with drafts.
FAST = ("--threads", "1", "--dtype", "float64", "--drafter", "off", "--served-name", "tiny", "--kv-blocks", "300")
TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}]
STRICT_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": TOOL, "strict": True}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": TOOL}}
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me"}], "stream_options": {"include_usage": True}}
PENALTIES = {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sampled": (CHAT, USER | {"max_tokens": 24, "ignore_eos": True}),
    "greedy": (CHAT, USER | {"max_tokens": 24, "temperature": 0, "ignore_eos": True}),
    "penalties": (CHAT, USER | PENALTIES | {"max_tokens": 24, "min_tokens": 20, "temperature": 1.5}),
    "logprobs": (
        CHAT,
        USER | {"max_tokens": 12, "logprobs": True, "top_logprobs": 2, "stop": ["zzz"], "ignore_eos": True},
    ),
    "forced": (
        CHAT,
        USER | {"max_tokens": 60, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "schema": (CHAT, USER | {"max_tokens": 50, "response_format": SCHEMA, "temperature": 1.5}),
    "strict": (CHAT, USER | {"max_tokens": 24, "n": 2, "tools": STRICT_TOOLS, "temperature": 1.5}),
    "three": (CHAT, USER | {"max_tokens": 12, "n": 3, "ignore_eos": True}),
    "three-forced": (CHAT, USER | {"max_tokens": 60, "n": 3, "tools": TOOLS, "tool_choice": "required"}),
    "echo": (COMPLETIONS, {"prompt": "Once upon a time", "echo": True, "max_tokens": 16, "ignore_eos": True}),
    "responses": (RESPONSES, {"input": "Tell me", "max_output_tokens": 16, "ignore_eos": True}),
}

SECRET = "open sesame, open sesame"


@pytest.fixture(scope="module")
def workers(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    logs = tmp_path_factory.mktemp("log")
    secret = logs / "secret"
    secret.write_text(f"{SECRET}\n")
    options = (*FAST, "--secret-file", str(secret))
    with serving_together(tiny_folder, (logs / "0", options), (logs / "1", options)) as both:
        for worker in both:
            worker.secret = SECRET
        yield both
    assert not any("Traceback" in path.read_text() for path in logs.iterdir())


def stream(worker: RealServer, path: str, body: dict[str, Any]) -> bytes:
    headers = {"Content-Type": "application/json", "X-Request-Id": "r-1", "x-stoker-stream": "1"}
    data = json.dumps({"model": "tiny", "stream": True, "seed": 11} | body).encode()
    headers |= signed(worker.url, worker.secret, path, data)
    with urllib.request.urlopen(urllib.request.Request(worker.url + path, data, headers), timeout=120) as answer:
        return bytes(answer.read())


def comparable(events: list[bytes]) -> list[bytes]:
    """Return events without cached tokens and without the last digits of logprobs, in which the kernels of prefill and
    decode may differ. Choices of one stream may come in any order."""
    masked = [re.sub(rb'"cached_tokens":\d+', b"", event) for event in events]
    masked = [re.sub(rb"-?\d+\.\d{9,}", lambda found: b"%.9f" % float(found[0]), event) for event in masked]
    return sorted(masked, key=lambda event: re.findall(rb'"choices":\[\{"index":(\d)', event))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "three-forced" else name for name in CASES]
)
def test_another_worker_continues_an_answer(workers: list[RealServer], name: str) -> None:
    path, body = CASES[name]
    first, second = workers
    blocks = blocks_of(stream(first, path, body))
    num_choices = body.get("n", 1)
    places = cuts(blocks)
    assert len(places) > 5
    for count in places[:3] + places[3:-3:5] + places[-3:]:
        num_events = {"events": len(shown(blocks[:count]))} if path == RESPONSES else {}
        resume = Seen().read(blocks[:count]).resume(num_choices, **num_events)
        rest = blocks_of(stream(second, path, body | {"resume": resume}))
        assert comparable(shown(rest)) == comparable(shown(blocks[count:])), count


def test_the_worker_sends_its_tokenizer_files(workers: list[RealServer], tiny_folder: Path) -> None:
    worker = workers[0]
    answers = {}
    for path in ("/stoker/worker", "/stoker/tokenizer"):
        request = urllib.request.Request(worker.url + path, headers=signed(worker.url, SECRET, path))
        with urllib.request.urlopen(request, timeout=60) as answer:
            answers[path] = json.load(answer)
    files = answers["/stoker/tokenizer"]["files"]
    assert files["tokenizer.json"] == (tiny_folder / "tokenizer.json").read_text()
    assert text_digest(files) == answers["/stoker/worker"]["tokenizer"]


@pytest.mark.slow  # test_fleet_side.py covers the registrar, gateway/test_real_fleet.py covers real workers
def test_the_worker_registers_and_unregisters(tiny_folder: Path, tmp_path: Path) -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    verifier = RequestVerifier(FleetKey(SECRET))

    class Gateway(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent = self.headers.get("x-stoker-auth", "").encode()
            head = verifier.check(sent, self.command.encode(), b"/stoker/register")
            if head is None:
                self.send_response(401)
                self.send_header("x-stoker-challenge", verifier.challenge)
            else:
                heard.append((self.command, json.loads(body)))
                self.send_response(200)
                self.send_header("x-stoker-proof", head.proof.decode())
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_DELETE = do_POST

        def log_message(self, *_: object) -> None: ...

    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    gateway = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=gateway.serve_forever).start()
    urls = f"http://127.0.0.1:{gateway.server_port},http://127.0.0.1:1"
    try:
        with serving(tiny_folder, tmp_path / "log", *FAST, "--gateway", urls, "--secret-file", str(secret)) as worker:
            wait_for(lambda: bool(heard))
            worker.secret = SECRET
            method, body = heard[0]
            assert (method, body["url"], body["models"]) == ("POST", worker.url, ["tiny"])
            assert body["events"].startswith("tcp://127.0.0.1:")
            assert worker.complete("Hello", max_tokens=2).status == 200
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(20) == 0
        assert [one[0] for one in heard].count("DELETE") == 1
        assert heard[-1][0] == "DELETE"
        assert heard[-1][1]["worker_id"] == body["worker_id"]
    finally:
        gateway.shutdown()
        gateway.server_close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--events-port", "65535"], "--events-port 65535"),
        (["--secret-file", "/nowhere/secret"], "--secret-file /nowhere/secret"),
        (["--secret-file", os.devnull], "holds no secret"),
        (["--gateway", "10.0.0.1:8000"], "--gateway 10.0.0.1:8000: expected a URL"),
        (["--advertise", "ftp://x"], "--advertise ftp://x: expected a URL"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 without --secret-file"),
        (["--api-key-file", "/k"], "--api-key-file has no effect without --secret-file"),
        (["--host", "0.0.0.0", "--insecure", "--gateway", "http://10.0.0.1:8000"], "give its URL with --advertise"),
    ],
    ids=str,
)
def test_an_invalid_setting_is_reported_before_the_model_loads(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", *options]) == 2
    assert reason in capsys.readouterr().err


def test_a_subscriber_knows_the_blocks(tiny_folder: Path, tmp_path: Path) -> None:
    context = zmq.Context()
    events = context.socket(zmq.SUB)
    events.set(zmq.RCVTIMEO, 60_000)
    known: dict[Any, BlockStored] = {}
    reports: list[WorkerReport] = []
    seqs: list[int] = []

    def read_until(done: Any) -> None:
        until = time.monotonic() + 60
        while not done():
            assert time.monotonic() < until
            message = read_message(events.recv_multipart())
            if message.topic == b"load":
                reports.append(msgspec.msgpack.decode(message.payload, type=WorkerReport))
                continue
            seqs.append(message.seq)
            for event in decode_batch(message.payload).events:
                match event:
                    case BlockStored():
                        known.update(dict.fromkeys(event.block_hashes, event))
                    case BlockRemoved():
                        for key in event.block_hashes:
                            del known[key]
                    case AllBlocksCleared():
                        known.clear()

    with serving(tiny_folder, tmp_path / "log", *FAST[:-1], "24") as worker:
        info = worker.send("/stoker/worker").json
        events.subscribe(b"")
        events.connect(info["events"])
        read_until(lambda: len(reports) >= 2)
        for salt in (None, "tenant"):
            salted = {} if salt is None else {"cache_salt": salt}
            body = {"return_token_ids": True, "max_tokens": 40, "ignore_eos": True, "seed": 1} | salted
            answer = worker.complete("Once upon a time there was a", **body).json["choices"][0]
            token_ids = answer["prompt_token_ids"] + answer["token_ids"]
            keys = block_keys(token_ids[:-1], root_key(info["fingerprint"], salt or ""), info["block_tokens"])
            assert len(keys) >= 2
            read_until(lambda keys=keys: set(keys) <= set(known))
            assert known[keys[0]].parent_block_hash is None
            assert bool(known[keys[0]].extra_keys) == (salt is not None)
        # More than fits: evictions are published.
        for i in range(8):
            worker.complete(f"{i} is a number, and so is the next one, which comes after it", max_tokens=60)
        wait_for(lambda: worker.is_idle)
        cached = "stoker_kv_blocks_cached"
        read_until(lambda: reports[-1].running_sequences == 0 and len(known) == worker.metrics()[cached])
        assert reports[-1].num_blocks == 24
        assert reports[-1].prefill_tokens_per_s > 0
        assert reports[-1].step_s > 0
        os.kill(worker.engine_pid, signal.SIGKILL)
        read_until(lambda: not known and not reports[-1].ready)
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    events.close(linger=0)
    context.term()
