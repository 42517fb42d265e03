"""Whether the same prompts give the same tokens through gateway, prefill and decode worker as from one unified worker.

Real processes with SmolLM2 in float64, where no batch size changes the order of two tokens; greedy. Every prompt is handed
over. The set: prompts of one token, of whole blocks exactly, long ones, second turns, forced tool calls, schemas, two
choices, and plain ones. Two answers are the same if their tokens and their finish reasons are. Besides, the number of
prompt tokens that the decode worker computed itself is counted: it must be 0, because prefill's first token comes with
the KV of all tokens before it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import Needs, Report, Result
from bench.support.processes import environment, python_module

if TYPE_CHECKING:
    import aiohttp

NAME = "handoff_identity"
HELP = "identical answers through prefill and decode workers and from one unified worker"
NEEDS = Needs(
    packages=("torch", "aiohttp", "msgspec", "tokenizers"),
    data=(
        *(f"prompts/{name}.jsonl.gz" for name in ("gsm8k", "arena", "humaneval", "mtbench", "specbench")),
        *(f"tools/{name}.jsonl.gz" for name in ("bfcl", "json_schema_suite")),
    ),
)
MODEL = "smollm2"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BLOCK_TOKENS = 16  # of a CPU worker
NEW_TOKENS = 14
SHORT_CHARS, LONG_CHARS = 320, 1800  # about 80 and 450 tokens
AT_ONCE = 8
START_S = 300.0
_FAILED_LOADS = "stoker_kv_failed_loads_total"
# Otherwise the decode worker computes short prompts itself, and all prompts when the workers are idle.
GATEWAY_TOML = "[routing]\nlocal_prefill_tokens = 0\nlocal_prefill_share = 1000.0\n"
# Kinds of prompts, in percent.
MIX = {"one_token": 4, "blocks": 12, "long": 6, "second_turn": 14, "tools": 12, "schema": 8, "two": 8, "plain": 36}


# ---- the prompts


@dataclass
class HandoffCase:
    kind: str
    path: str
    body: dict[str, Any]
    num_choices: int = 1


def lines(data: Path, name: str) -> list[Any]:
    with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class PromptFiles:
    """The texts, tools and schemas that prompts are made of."""

    def __init__(self, data: Path, rng: random.Random) -> None:
        single = [row["turns"][0] for name in ("gsm8k", "arena", "humaneval") for row in lines(data, f"prompts/{name}")]
        turns = [row["turns"] for name in ("mtbench", "specbench") for row in lines(data, f"prompts/{name}")]
        pairs = [pair for pair in turns if len(pair) == 2 and sum(map(len, pair)) <= 2 * SHORT_CHARS]
        rng.shuffle(single)
        self._rng = rng
        self._texts = cycle([text for text in single if len(text) <= SHORT_CHARS])
        self._longs = cycle([text[:LONG_CHARS] for text in single if len(text) >= LONG_CHARS])
        self._pairs = cycle(pairs)
        self._tools = cycle([row for row in lines(data, "tools/bfcl") if len(row["question"]) == 1 and _is_short(row)])
        self._schemas = [row["schema"] for row in lines(data, "tools/json_schema_suite") if _is_object(row["schema"])]

    def case(self, kind: str, number: int) -> HandoffCase:
        match kind:
            case "one_token":
                return HandoffCase(kind, COMPLETIONS, {"prompt": self._ids(1)})
            case "blocks":
                return HandoffCase(kind, COMPLETIONS, {"prompt": self._ids(BLOCK_TOKENS * (1 + number % 8))})
            case "long":
                return _chat(kind, [next(self._longs)])
            case "second_turn":
                return _chat(kind, next(self._pairs))
            case "tools":
                row = next(self._tools)
                functions = [{"type": "function", "function": _function(one)} for one in row["function"]]
                return _chat(kind, [], messages=row["question"][0], tools=functions, tool_choice="required")
            case "schema":
                schema = {"name": "answer", "schema": self._rng.choice(self._schemas)}
                wanted = {"type": "json_schema", "json_schema": schema}
                return _chat(kind, [next(self._texts)], response_format=wanted)
            case "two":
                return _chat(kind, [next(self._texts)], n=2)
            case _:
                return _chat(kind, [next(self._texts)])

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(100, 40_000) for _ in range(count)]


def cases(data: Path, num: int, rng: random.Random) -> list[HandoffCase]:
    """Make the cases. The same number gives the same cases."""
    sources = PromptFiles(data, rng)
    made = [sources.case(kind, i) for kind, share in MIX.items() for i in range(max(1, round(num * share / 100)))]
    rng.shuffle(made)
    return made


def _chat(kind: str, turns: list[str], **more: Any) -> HandoffCase:
    """A chat of one or two user turns. The answer to the first turn is requested on the way."""
    messages = [{"role": "user", "content": turn} for turn in turns]
    return HandoffCase(kind, CHAT, {"messages": messages} | more, more.get("n", 1))


def _is_short(row: Any) -> bool:
    words = json.dumps(row.get("function", [])) + json.dumps(row["question"])
    return bool(row.get("function")) and len(words) < 3 * SHORT_CHARS and '"type": "any"' not in words


def _is_object(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "object" and "$ref" not in json.dumps(schema)


def _function(one: dict[str, Any]) -> dict[str, Any]:
    """BFCL writes dict, float and tuple for JSON Schema's object, number and array. Function names may have no dots."""
    text = json.dumps(one["parameters"])
    for theirs, ours in (("dict", "object"), ("float", "number"), ("tuple", "array")):
        text = text.replace(f'"type": "{theirs}"', f'"type": "{ours}"')
    name = one["name"].replace(".", "_")
    return {"name": name, "description": one["description"], "parameters": json.loads(text)}


# ---- requests


@dataclass
class HandoffAnswer:
    """`tokens` is None if the request was refused; `content` is then the reason."""

    tokens: Any
    finish: list[str]
    usage: dict[str, Any] = field(default_factory=dict)
    content: str = ""

    def same_as(self, other: HandoffAnswer) -> bool:
        counts = [(said.usage.get("prompt_tokens"), said.usage.get("completion_tokens")) for said in (self, other)]
        return (self.tokens, self.finish, self.content) == (other.tokens, other.finish, other.content) and (
            counts[0] == counts[1]
        )


async def send(http: aiohttp.ClientSession, url: str, case: HandoffCase, body: dict[str, Any]) -> HandoffAnswer:
    common = {"model": MODEL, "temperature": 0, "max_tokens": NEW_TOKENS, "seed": 1}
    extra = {"logprobs": True} if case.path == CHAT else {"return_token_ids": True}
    async with http.post(url + case.path, json=common | extra | body) as response:
        answer = await response.json()
        if response.status == 400:  # such as an unsupported schema: both must refuse it
            return HandoffAnswer(None, [], {}, answer["error"]["message"])
        if response.status != 200:
            raise RuntimeError(f"{case.kind}: {response.status} {answer}")
    choices = answer["choices"]
    finish = [choice["finish_reason"] for choice in choices]
    if case.path == COMPLETIONS:
        return HandoffAnswer([choice["token_ids"] for choice in choices], finish, answer["usage"])
    tokens = [
        (
            [(token["token"], token["bytes"]) for token in (choice["logprobs"] or {}).get("content") or ()],
            [call["function"] for call in choice["message"].get("tool_calls") or ()],
            choice["message"]["content"],
        )
        for choice in choices
    ]
    return HandoffAnswer(tokens, finish, answer["usage"], choices[0]["message"]["content"] or "")


async def run_case(
    http: aiohttp.ClientSession, urls: dict[str, str], case: HandoffCase
) -> list[tuple[HandoffAnswer, HandoffAnswer]]:
    """The answers of the unified worker and of the pair, for each turn."""
    if case.kind != "second_turn":
        return [await _both(http, urls, case, case.body)]
    turns, messages, found = case.body["messages"], [], []
    for turn in turns:
        messages.append(turn)
        found.append(await _both(http, urls, case, {"messages": messages}))
        messages.append({"role": "assistant", "content": found[-1][0].content})
    return found


async def _both(
    http: aiohttp.ClientSession, urls: dict[str, str], case: HandoffCase, body: dict[str, Any]
) -> tuple[HandoffAnswer, HandoffAnswer]:
    alone, pair = await asyncio.gather(*(send(http, urls[name], case, body) for name in ("unified", "gateway")))
    return alone, pair


# ---- processes


async def _printed_url(lines: asyncio.StreamReader) -> str | None:
    async for line in lines:
        if found := re.search(rb"(http://[^/\s]+:\d+)/v1/", line):
            return found[1].decode()
    return None


@contextlib.asynccontextmanager
async def started(name: str, arguments: list[str], work: Path) -> AsyncIterator[str]:
    """Start a stoker command; yield its URL when it takes requests."""
    with (work / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *python_module("stoker.cli.main", *arguments, "--port", 0),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment(),
        )
    assert process.stdout is not None
    try:
        url = await asyncio.wait_for(_printed_url(process.stdout), START_S)
        if url is None:
            raise RuntimeError(f"{name} did not start: {(work / f'{name}.log').read_text()[-2000:]}")
        drain = asyncio.create_task(process.stdout.read())
        yield url
        drain.cancel()
    finally:
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await process.wait()


async def metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with http.get(f"{url}/metrics") as response:
        page = await response.text()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")}


async def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    todo = cases(args.data, args.prompts, random.Random(args.prompts))
    serve = ["serve", *([args.model] if args.model else []), "--served-name", MODEL, "--dtype", "float64"]
    serve += ["--threads", "1", "--kv-blocks", "4000", "--max-model-tokens", "4096"]
    (work / "gateway.toml").write_text(GATEWAY_TOML)
    async with contextlib.AsyncExitStack() as stack:
        urls = {}
        for role in ("unified", "prefill", "decode"):
            urls[role] = await stack.enter_async_context(started(role, [*serve, "--role", role], work))
        gateway = ["gateway", "--store", "none", "--config", str(work / "gateway.toml")]
        for role in ("prefill", "decode"):
            gateway += ["--worker", f"{urls[role]},role={role}"]
        urls["gateway"] = await stack.enter_async_context(started("gateway", gateway, work))
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        await _warm(http, urls)
        return await _run(http, urls, todo)


async def _warm(http: aiohttp.ClientSession, urls: dict[str, str]) -> None:
    """Send requests until one was handed over: the gateway then knows both workers."""
    body = {"model": MODEL, "prompt": list(range(200, 240)), "max_tokens": 4}
    async with asyncio.timeout(START_S):
        while not await _handoffs(http, urls):
            async with http.post(urls["gateway"] + COMPLETIONS, json=body) as response:
                await response.read()
            await asyncio.sleep(0.5)


async def _handoffs(http: aiohttp.ClientSession, urls: dict[str, str]) -> float:
    return (await metrics(http, urls["gateway"])).get('stoker_gateway_handoffs_total{outcome="done"}', 0.0)


async def _run(http: aiohttp.ClientSession, urls: dict[str, str], todo: list[HandoffCase]) -> dict[str, Any]:
    await asyncio.sleep(1.0)  # engines report four times a second
    began_s, before, handed_before = time.monotonic(), await metrics(http, urls["decode"]), await _handoffs(http, urls)
    differing: list[str] = []
    kinds: Counter[str] = Counter()
    num_refused = num_answers = prompt_tokens = after_first = 0
    waiting = iter(enumerate(todo))

    async def client() -> None:
        nonlocal num_refused, num_answers, prompt_tokens, after_first
        for number, case in waiting:
            for alone, pair in await run_case(http, urls, case):
                if not alone.same_as(pair):
                    differing.append(f"{case.kind} {number}")
                    print(f"differs: {case.kind} {number}\n  {alone}\n  {pair}", flush=True)
                if pair.tokens is None:
                    num_refused += 1
                    continue
                num_answers += 1
                kinds[case.kind] += 1
                prompt_tokens += pair.usage["prompt_tokens"]
                after_first += pair.usage["completion_tokens"] - case.num_choices
            if number % 50 == 49:
                print(f"{number + 1} of {len(todo)}, {time.monotonic() - began_s:.0f} s", flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(client())
    seconds = time.monotonic() - began_s
    await asyncio.sleep(1.0)
    after, handed_off = await metrics(http, urls["decode"]), await _handoffs(http, urls) - handed_before
    leases = (await metrics(http, urls["prefill"]))["stoker_kv_leases"]
    computed, pulled = (
        after[name] - before[name] for name in ("stoker_computed_tokens_total", "stoker_kv_pulled_tokens_total")
    )
    return {
        "prompts": num_answers,
        "kinds": dict(kinds),
        "differing_answers": len(differing),
        "differing": differing,
        "prompt_tokens": prompt_tokens,
        "decode_pulled_tokens": int(pulled),
        "decode_computed_tokens": int(computed),
        "decode_computed_prompt_tokens": int(computed) - after_first,
        "tail_that_cannot_be_pulled": 0,
        "decode_late_loads": int(
            after[_FAILED_LOADS] - before[_FAILED_LOADS]
        ),  # late or failed loads, whose KV was computed again
        "handed_off_share": round(handed_off / num_answers, 4),
        "refused_by_both": num_refused,
        "leases_left": int(leases),
        "seconds": round(seconds, 1),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--model", help="as `stoker serve` takes it (default: SmolLM2)")


def run(args: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory(prefix="handoff-") as work:
        found = asyncio.run(measure(args, Path(work)))
    case = f"{found['prompts']} answers"
    results = [
        Result(case, "answers that differ", "answers", found["differing_answers"]),
        Result(case, "prompt tokens computed by the decode worker", "tokens", found["decode_computed_prompt_tokens"]),
        Result(case, "prompt tokens", "tokens", found["prompt_tokens"]),
        Result(case, "prompt tokens pulled by the decode worker", "tokens", found["decode_pulled_tokens"]),
        Result(case, "failed KV loads", "loads", found["decode_late_loads"]),
        Result(case, "leases left at the end", "leases", found["leases_left"]),
        Result(case, "schemas refused by both", "requests", found["refused_by_both"]),
    ]
    differing = found["differing_answers"]
    return Report(results, found, [f"{differing} answers differ"] if differing else [])
