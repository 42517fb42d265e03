"""Conversations as the blocks of tokens that workers will make of them: rendered and tokenized as a worker does it.

The tokenizer's files come from a worker (`GET /stoker/tokenizer`) or from a model's folder. The unchanged part of a long
conversation is recognised, not tokenized (prefix_memo.py).
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stoker.base.errors import InvalidRequest, ModelFilesError
from stoker.gateway.api.client_body import Envelope, Kind
from stoker.gateway.prefix.conversation import Keys
from stoker.gateway.prefix.prefix_keys import root_key, token_keys
from stoker.gateway.prefix.prefix_memo import PrefixMemo
from stoker.kv.blocks.keys import salt_hash
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.completions import CompletionRequest
from stoker.proto.openai.decode import decode
from stoker.proto.openai.responses import ResponsesRequest
from stoker.text.conversation import (
    Conversation,
    chat_conversation,
    completion_prompts,
    is_constrained,
    render_text,
    responses_conversation,
)
from stoker.text.folder import text_digest
from stoker.text.template import ChatTemplate
from stoker.text.tokenizer import Tokenizer
from stoker.text.tools import chat_tools, responses_tools

_ANY_NUMBER_OF_TOOLS = 1 << 30  # how many are too many is for the worker to say
_MAX_TOKEN_CHARS = 64  # a prompt with more characters for each token that fits is refused by the worker anyway
_MAX_TOKEN_ID = (1 << 32) - 1


# The gateway's own fields, and those of workers that are not ours, may stand in a body besides.
class _Chat(ChatRequest, kw_only=True, forbid_unknown_fields=False):
    pass


class _Completion(CompletionRequest, kw_only=True, forbid_unknown_fields=False):
    pass


class _Responses(ResponsesRequest, kw_only=True, forbid_unknown_fields=False):
    pass


@dataclass(frozen=True, slots=True)
class TokenText:
    """A model's tokenizer and chat template. `digest` says of which files."""

    tokenizer: Tokenizer
    template: ChatTemplate
    digest: str

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> TokenText:
        """From what a worker answers to `GET /stoker/tokenizer`."""
        with tempfile.TemporaryDirectory(prefix="stoker-tokenizer-") as name:
            folder = Path(name)
            for file, text in files.items():
                path = PurePosixPath(file)
                if path.is_absolute() or not set(path.parts[:-1]) <= {"additional_chat_templates"}:
                    raise ModelFilesError(f"a worker's tokenizer has a file {file!r}: not a name in a model's folder")
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
            return cls.from_folder(folder, text_digest(dict(files)))

    @classmethod
    def from_folder(cls, folder: Path, digest: str = "") -> TokenText:
        tokenizer = Tokenizer.from_folder(folder)
        return cls(tokenizer, ChatTemplate.from_folder(folder, tokenizer), digest)


class TokenKeys:
    def __init__(self, text: TokenText, block_tokens: int, max_model_tokens: int | None = None) -> None:
        self.block_tokens = block_tokens
        self.digest = text.digest
        self._text = text
        self._memo = PrefixMemo(text.tokenizer, block_tokens)
        self._max_chars = None if max_model_tokens is None else _MAX_TOKEN_CHARS * max_model_tokens

    def keys(self, envelope: Envelope, salt: str | None = None) -> Keys:
        root = root_key(salt_hash(salt) if salt else None)
        match envelope.kind:
            case Kind.COMPLETIONS:
                return self._of_completion(decode(_Completion, envelope.raw), root)
            case Kind.CHAT:
                chat = decode(_Chat, envelope.raw)
                given, conversation = chat.prompt_token_ids, _of_chat(chat)
            case Kind.RESPONSES:
                response = decode(_Responses, envelope.raw)
                given, conversation = response.prompt_token_ids, _of_response(response)
        if given is not None:
            return self._of_ids(given, root)
        assert conversation is not None
        rendered = render_text(self._text.template, conversation)
        self._bound(len(rendered))
        keys, num_tokens = self._memo.blocks(rendered, root)
        return Keys(keys, self.block_tokens, num_tokens)

    def _of_completion(self, body: CompletionRequest, root: int) -> Keys:
        """Several prompts go to one worker together: it is found by the first, and charged with all."""
        first: Keys | None = None
        num_tokens = 0
        for _, prompt in completion_prompts(body):
            if isinstance(prompt, str):
                self._bound(len(prompt))
                found = self._of_ids(self._text.tokenizer.encode(prompt, add_special_tokens=True), root)
            else:
                found = self._of_ids(prompt, root)
            first = first or found
            num_tokens += found.num_tokens
        assert first is not None
        return Keys(first.keys, self.block_tokens, num_tokens)

    def _of_ids(self, token_ids: list[int], root: int) -> Keys:
        if token_ids and max(token_ids) > _MAX_TOKEN_ID:
            raise InvalidRequest(f"token id {max(token_ids)} is in no vocabulary")
        return Keys(token_keys(array("I", token_ids), root, self.block_tokens), self.block_tokens, len(token_ids))

    def _bound(self, num_chars: int) -> None:
        if self._max_chars is not None and num_chars > self._max_chars:
            raise InvalidRequest(f"a prompt of {num_chars} characters, more than {self._max_chars}, fits no context")


def _of_chat(body: ChatRequest) -> Conversation | None:
    """None where token ids stand for the conversation."""
    if body.prompt_token_ids is not None:
        return None
    tools = chat_tools(body, _ANY_NUMBER_OF_TOOLS)
    return chat_conversation(body, tools, is_constrained(body, body.response_format, tools))


def _of_response(body: ResponsesRequest) -> Conversation | None:
    if body.prompt_token_ids is not None:
        return None
    tools = responses_tools(body, _ANY_NUMBER_OF_TOOLS)
    form = body.text.format if body.text else None
    return responses_conversation(body, tools, is_constrained(body, form, tools))
