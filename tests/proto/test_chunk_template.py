"""The events of a ChunkTemplate equal those of encoding each chunk as a whole."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET

from stoker.proto.openai.chat import ChatChunk, ChatChunkChoice, ChatDelta
from stoker.proto.openai.chunk_template import ChunkTemplate
from stoker.proto.openai.completions import CompletionChoice, TextCompletion
from stoker.proto.sse import encode_event

NAMES = ("tiny", 'a "choices":[] model', '\\"choices\\":[', "モデル")


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize("usage", [None, UNSET])
def test_completion_events(model: str, usage: msgspec.UnsetType | None) -> None:
    def chunk(choices: list[CompletionChoice]) -> TextCompletion:
        return TextCompletion(
            id="cmpl-1", created=7, model=model, system_fingerprint="fp", choices=choices, usage=usage
        )

    template = ChunkTemplate(chunk([]))
    for choice in (
        CompletionChoice(index=0, text='say "choices":[]\n🦊'),
        CompletionChoice(index=3, text="", finish_reason="stop", token_ids=[1, 2]),
    ):
        assert template.event(choice) == encode_event(msgspec.json.encode(chunk([choice])))


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize("prompt_token_ids", [[1, 2, 3], UNSET])
def test_chat_events(model: str, prompt_token_ids: list[int] | msgspec.UnsetType) -> None:
    def chunk(choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id="chatcmpl-1",
            created=7,
            model=model,
            system_fingerprint="fp",
            choices=choices,
            prompt_token_ids=prompt_token_ids,
        )

    choice = ChatChunkChoice(index=1, delta=ChatDelta(role="assistant", content="hé\u2028"), finish_reason="length")
    assert ChunkTemplate(chunk([])).event(choice) == encode_event(msgspec.json.encode(chunk([choice])))
