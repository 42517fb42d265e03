"""Hundreds of public prompts through gateway, prefill and decode worker, and through one unified worker: the same tokens?

    python bench/handoff_identity.py --data PATH/data --prompts 500 --out handoff

Real processes on SmolLM2 in float64, where no batch makes a near tie flip; greedy. Every prompt is handed over. The set: prompts
of one token, of whole blocks exactly, long ones, second turns, forced tool calls, schemas, two choices, and plain ones. An answer
counts as the same if its tokens are, and why it ended. Besides: how many prompt tokens decode computed itself. What it could not
pull is nothing: prefill's first token comes with the KV of all before it. Writes OUT.json; exit code 1 if any answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp

STOKER = str(Path(sys.executable).parent / "stoker")
MODEL = "smollm2"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BLOCK_TOKENS = 16  # a CPU worker's
NEW_TOKENS = 14
SHORT_CHARS, LONG_CHARS = 320, 1800  # about 80 and 450 tokens
AT_ONCE = 8
START_S = 300.0
_LATE = "stoker_kv_failed_loads_total"
# Else the decode worker computes short prompts itself, and on an idle fleet all of them.
GATEWAY_TOML = "[routing]\nlocal_prefill_tokens = 0\nlocal_prefill_share = 1000.0\n"
# Of a hundred prompts.
MIX = {"one_token": 4, "blocks": 12, "long": 6, "second_turn": 14, "tools": 12, "schema": 8, "two": 8, "plain": 36}


# ---- the prompts


@dataclass
class Case:
    kind: str
    path: str
    body: dict[str, Any]
    num_choices: int = 1


def lines(data: Path, name: str) -> list[Any]:
    with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Sources:
    """What prompts are made of, in an order of their own."""

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

    def case(self, kind: str, number: int) -> Case:
        match kind:
            case "one_token":
                return Case(kind, COMPLETIONS, {"prompt": self._ids(1)})
            case "blocks":
                return Case(kind, COMPLETIONS, {"prompt": self._ids(BLOCK_TOKENS * (1 + number % 8))})
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
                asked = {"type": "json_schema", "json_schema": schema}
                return _chat(kind, [next(self._texts)], response_format=asked)
            case "two":
                return _chat(kind, [next(self._texts)], n=2)
            case _:
                return _chat(kind, [next(self._texts)])

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(100, 40_000) for _ in range(count)]


def cases(data: Path, num: int, rng: random.Random) -> list[Case]:
    """The same for the same number."""
    sources = Sources(data, rng)
    made = [sources.case(kind, i) for kind, share in MIX.items() for i in range(max(1, round(num * share / 100)))]
    rng.shuffle(made)
    return made


def _chat(kind: str, turns: list[str], **more: Any) -> Case:
    """Of two turns, the answer to the first is asked for on the way."""
    messages = [{"role": "user", "content": turn} for turn in turns]
    return Case(kind, CHAT, {"messages": messages} | more, more.get("n", 1))


def _is_short(row: Any) -> bool:
    words = json.dumps(row.get("function", [])) + json.dumps(row["question"])
    return bool(row.get("function")) and len(words) < 3 * SHORT_CHARS and '"type": "any"' not in words


def _is_object(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "object" and "$ref" not in json.dumps(schema)


def _function(one: dict[str, Any]) -> dict[str, Any]:
    """The set says dict, float and tuple where JSON Schema says object, number and array. Names have no dots with us."""
    text = json.dumps(one["parameters"])
    for theirs, ours in (("dict", "object"), ("float", "number"), ("tuple", "array")):
        text = text.replace(f'"type": "{theirs}"', f'"type": "{ours}"')
    name = one["name"].replace(".", "_")
    return {"name": name, "description": one["description"], "parameters": json.loads(text)}


# ---- asking


@dataclass
class Said:
    """`tokens` None: refused, with `content` as the reason."""

    tokens: Any
    finish: list[str]
    usage: dict[str, Any] = field(default_factory=dict)
    content: str = ""

    def same_as(self, other: Said) -> bool:
        counts = [(said.usage.get("prompt_tokens"), said.usage.get("completion_tokens")) for said in (self, other)]
        return (self.tokens, self.finish, self.content) == (other.tokens, other.finish, other.content) and (
            counts[0] == counts[1]
        )


async def ask(http: aiohttp.ClientSession, url: str, case: Case, body: dict[str, Any]) -> Said:
    common = {"model": MODEL, "temperature": 0, "max_tokens": NEW_TOKENS, "seed": 1}
    tells = {"logprobs": True} if case.path == CHAT else {"return_token_ids": True}
    async with http.post(url + case.path, json=common | tells | body) as response:
        answer = await response.json()
        if response.status == 400:  # a schema that no grammar can be made of, say: both must say so
            return Said(None, [], {}, answer["error"]["message"])
        if response.status != 200:
            raise RuntimeError(f"{case.kind}: {response.status} {answer}")
    choices = answer["choices"]
    finish = [choice["finish_reason"] for choice in choices]
    if case.path == COMPLETIONS:
        return Said([choice["token_ids"] for choice in choices], finish, answer["usage"])
    tokens = [
        (
            [(token["token"], token["bytes"]) for token in (choice["logprobs"] or {}).get("content") or ()],
            [call["function"] for call in choice["message"].get("tool_calls") or ()],
            choice["message"]["content"],
        )
        for choice in choices
    ]
    return Said(tokens, finish, answer["usage"], choices[0]["message"]["content"] or "")


async def run_case(http: aiohttp.ClientSession, urls: dict[str, str], case: Case) -> list[tuple[Said, Said]]:
    """What the unified worker and the pair say, turn after turn."""
    if case.kind != "second_turn":
        return [await _both(http, urls, case, case.body)]
    turns, messages, found = case.body["messages"], [], []
    for turn in turns:
        messages.append(turn)
        found.append(await _both(http, urls, case, {"messages": messages}))
        messages.append({"role": "assistant", "content": found[-1][0].content})
    return found


async def _both(
    http: aiohttp.ClientSession, urls: dict[str, str], case: Case, body: dict[str, Any]
) -> tuple[Said, Said]:
    alone, pair = await asyncio.gather(*(ask(http, urls[name], case, body) for name in ("unified", "gateway")))
    return alone, pair


# ---- processes


async def _told_url(lines: asyncio.StreamReader) -> str | None:
    async for line in lines:
        if found := re.search(rb"(http://[^/\s]+:\d+)/v1/", line):
            return found[1].decode()
    return None


@contextlib.asynccontextmanager
async def started(name: str, arguments: list[str], work: Path) -> AsyncIterator[str]:
    """Its URL, once it takes requests."""
    with (work / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            STOKER, *arguments, "--port", "0", stdout=asyncio.subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None
    try:
        url = await asyncio.wait_for(_told_url(process.stdout), START_S)
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
        gateway = ["gateway", "--ledger", "none", "--config", str(work / "gateway.toml")]
        for role in ("prefill", "decode"):
            gateway += ["--worker", f"{urls[role]},role={role}"]
        urls["gateway"] = await stack.enter_async_context(started("gateway", gateway, work))
        timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        await _warm(http, urls)
        return await _run(http, urls, todo)


async def _warm(http: aiohttp.ClientSession, urls: dict[str, str]) -> None:
    """Until the gateway knows both workers, and they each other."""
    body = {"model": MODEL, "prompt": list(range(200, 240)), "max_tokens": 4}
    async with asyncio.timeout(START_S):
        while not await _handoffs(http, urls):
            async with http.post(urls["gateway"] + COMPLETIONS, json=body) as response:
                await response.read()
            await asyncio.sleep(0.5)


async def _handoffs(http: aiohttp.ClientSession, urls: dict[str, str]) -> float:
    return (await metrics(http, urls["gateway"])).get('stoker_gateway_handoffs_total{outcome="done"}', 0.0)


async def _run(http: aiohttp.ClientSession, urls: dict[str, str], todo: list[Case]) -> dict[str, Any]:
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
        "decode_late_loads": int(after[_LATE] - before[_LATE]),  # KV that did not come in time, and was computed
        "handed_off_share": round(handed_off / num_answers, 4),
        "refused_by_both": num_refused,
        "leases_left": int(leases),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with prompts/, tools/ and agentic/")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--model", help="as `stoker serve` takes it (default: SmolLM2)")
    parser.add_argument("--out", type=Path, default=Path("handoff"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="handoff-") as work:
        found = asyncio.run(measure(args, Path(work)))
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    sys.exit(1 if found["differing_answers"] else 0)


if __name__ == "__main__":
    main()
