"""Mock workers that publish what Stoker workers publish: KV events, load reports, and the work of each request at once.

    python -m bench.support.publishing_worker PORT [PORT ...]

They are the workers of bench/support/placement_load.py, with blocks of tokens instead of characters. Their tokenizer makes a token
of every four characters, so that a block of 64 tokens has 256 characters, too. Several gateways share what they know only through
such workers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from bench.support.placement_load import ALPHABET, BLOCK_CHARS, MISSED_BLOCK_S, MODEL, CachingWorker

if TYPE_CHECKING:
    from aiohttp import web

    from stoker.gateway.prefix.token_prefix_keys import TokenText
    from stoker.proto.messages import WorkerReport

_TOKEN_CHARS = 4
_BLOCK_TOKENS = BLOCK_CHARS // _TOKEN_CHARS
_END = "<|end|>"
_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}" + _END + "{% endfor %}assistant:"


def text_files() -> dict[str, str]:
    """Return the tokenizer and the chat template, as files of a model folder."""
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

    words = ("".join(letters) for letters in itertools.product(ALPHABET, repeat=_TOKEN_CHARS))
    vocabulary = {word: number for number, word in enumerate(["?", *words])}
    raw = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(rf"[\s\S]{{{_TOKEN_CHARS}}}"), "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
    settings = json.dumps({"eos_token": _END, "chat_template": _TEMPLATE})
    return {"tokenizer.json": raw.to_str(), "tokenizer_config.json": settings, "chat_template.jinja": _TEMPLATE}


class PublishingWorker(CachingWorker):
    """A mock worker that describes itself as a Stoker worker."""

    def __init__(self, port: int, files: dict[str, str], text: TokenText) -> None:
        from stoker.worker.open_work import OpenWork
        from stoker.worker.report import Reporter

        self._files, self._text = files, text
        self._reporter = Reporter("127.0.0.1")
        self._work = OpenWork()
        super().__init__(port)

    def reset(self, cache_blocks: int) -> None:
        super().reset(cache_blocks)
        self._reporter.all_blocks_lost()

    def routes(self, app: web.Application) -> None:
        from aiohttp import web

        from stoker.proto.internal_http import TOKENIZER_PATH, WORKER_INFO_PATH

        info = {
            "worker_id": f"w-{self._port}",
            "role": "unified",
            "models": [MODEL],
            "fingerprint": MODEL,
            "block_tokens": _BLOCK_TOKENS,
            "num_blocks": 6_000,
            "max_model_tokens": 200_000,
            "events": f"tcp://127.0.0.1:{self._reporter.events_port}",
            "replay": f"tcp://127.0.0.1:{self._reporter.replay_port}",
            "tokenizer": self._text.digest,
        }

        async def get_worker(_: web.Request) -> web.Response:
            return web.json_response(info)

        async def get_tokenizer(_: web.Request) -> web.Response:
            return web.json_response({"files": self._files})

        super().routes(app)
        app.router.add_get(WORKER_INFO_PATH, get_worker)
        app.router.add_get(TOKENIZER_PATH, get_tokenizer)
        self._reporter.follow(self._work)
        self._reporter.start(self._report)

    async def answer(self, request: web.Request, messages: list[dict[str, Any]]) -> tuple[int, int]:
        from stoker.proto.work import WORK_HEADER

        text = "".join(f"{message['role']}:{message['content']}{_END}" for message in messages) + "assistant:"
        tokens = self._text.tokenizer.encode(text)
        work = self._work.accept(request.headers.get(WORK_HEADER), len(tokens), 1)
        try:
            found, blocks = self._look_up_tokens(list(tokens))
            await self.compute(blocks - found)
            work.first_token()
        finally:
            work.end()
        return found, blocks

    def _look_up_tokens(self, tokens: list[int]) -> tuple[int, int]:
        """Return how many leading blocks were cached, and how many there are; then cache and publish all of them."""
        from stoker.base.ids import BlockKey
        from stoker.proto.messages import BlocksForgotten, BlocksNamed, KvEvents

        keys, key = [], b""
        for at in range(0, len(tokens) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS):
            key = blake2b(key + repr(tokens[at : at + _BLOCK_TOKENS]).encode(), digest_size=16).digest()
            keys.append(BlockKey(key))
        found, forgotten = self.touch(keys)
        events: list[BlocksNamed | BlocksForgotten] = []
        if keys[found:]:
            new = tokens[found * _BLOCK_TOKENS : len(keys) * _BLOCK_TOKENS]
            parent = keys[found - 1] if found else None
            events.append(BlocksNamed(keys=keys[found:], parent=parent, token_ids=new))
        if forgotten:
            events.append(BlocksForgotten(keys=[BlockKey(key) for key in forgotten]))
        if events:
            self._reporter.blocks_changed(KvEvents(events=events))
        return found, len(keys)

    def _report(self, number: int) -> WorkerReport:
        from stoker.base.ids import WorkerId
        from stoker.proto.messages import WorkerReport

        running = len(self._work.snapshot())
        return WorkerReport(
            worker_id=WorkerId(f"w-{self._port}"),
            number=number,
            role="unified",
            ready=True,
            draining=False,
            waiting_sequences=0,
            waiting_tokens=0,
            running_sequences=running,
            free_blocks=max(0, self.num_free),
            num_blocks=self.num_free + self.num_cached,
            block_tokens=_BLOCK_TOKENS,
            prefill_tokens_per_s=_BLOCK_TOKENS / MISSED_BLOCK_S,
            step_s=0.01,
        )


async def run_workers(ports: Sequence[int]) -> None:
    from stoker.gateway.prefix.token_prefix_keys import TokenText

    files = text_files()
    text = TokenText.from_files(files)
    for port in ports:
        await PublishingWorker(port, files, text).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ports", type=int, nargs="+")
    asyncio.run(run_workers(parser.parse_args().ports))


if __name__ == "__main__":
    main()
