"""Tokenizers whose words begin with their blank: an answer that goes on with a text begins with it, one that stands alone does
not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from fake_engine import FakeService
from http_server import Server, run_server
from tokenizers import decoders, models, pre_tokenizers

from stoker.text.template import ChatTemplate
from stoker.text.tokenizer import Tokenizer
from stoker.worker.config import HttpConfig
from stoker.worker.context import ModelText

WORDS = ("<s>", "</s>", "▁brown", "▁fox", "▁The", "▁quick")
DECODERS = {
    "cut": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "first token": decoders.Metaspace(),
}


@pytest.fixture(params=DECODERS)
def pieced(request: pytest.FixtureRequest) -> Iterator[Server]:
    raw = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = DECODERS[request.param]
    raw.add_special_tokens(["<s>", "</s>"])
    tokenizer = Tokenizer(raw, eos_token_ids=[1], eos_token="</s>")
    template = "{% for message in messages %}<s>{{ message.content }}{% endfor %}"
    text = ModelText.of(tokenizer, ChatTemplate({"default": template}, tokenizer))
    server = Server(FakeService(tokenizer), text, HttpConfig(served_names=("tiny",)))
    server.say("brown fox")
    stop = run_server(server)
    yield server
    stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "answer"), [("The quick", " brown fox"), ([4, 5], " brown fox"), ([0], "brown fox")]
)
def test_a_completion_goes_on_with_its_prompt(pieced: Server, prompt: Any, answer: str, stream: bool) -> None:
    got = pieced.send("/v1/completions", {"prompt": prompt, "stream": stream})
    chunks = got.chunks if stream else [got.json]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == answer


@pytest.mark.parametrize(("continued", "answer"), [(False, "brown fox"), (True, " brown fox")])
def test_a_chats_answer_stands_alone_unless_it_is_continued(pieced: Server, continued: bool, answer: str) -> None:
    messages = [{"role": "user", "content": "quick"}, {"role": "assistant", "content": "The quick"}]
    body = {"messages": messages, "continue_final_message": continued, "add_generation_prompt": False}
    got = pieced.send("/v1/chat/completions", body)
    assert got.json["choices"][0]["message"]["content"] == answer
