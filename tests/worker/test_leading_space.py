"""Tokenizers whose words start with a space: an answer that continues a text keeps it, any other answer does not."""

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
def test_a_completion_keeps_its_leading_space(pieced: Server, prompt: Any, answer: str, stream: bool) -> None:
    got = pieced.send("/v1/completions", {"prompt": prompt, "stream": stream})
    chunks = got.chunks if stream else [got.json]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == answer


@pytest.mark.parametrize(("continued", "answer"), [(False, "brown fox"), (True, " brown fox")])
def test_a_chat_answer_has_no_leading_space_unless_it_continues_a_message(
    pieced: Server, continued: bool, answer: str
) -> None:
    messages = [{"role": "user", "content": "quick"}, {"role": "assistant", "content": "The quick"}]
    body = {"messages": messages, "continue_final_message": continued, "add_generation_prompt": False}
    got = pieced.send("/v1/chat/completions", body)
    assert got.json["choices"][0]["message"]["content"] == answer
