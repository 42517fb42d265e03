"""Prefix keys over tokens: the conversation is rendered and tokenized exactly as a worker does it.

The tokenizer's files come from a worker (`GET /stoker/tokenizer`) or from a model's folder. The unchanged beginning of a long
conversation comes from a cache and is not tokenized again (`prefix_memo.py`).
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from stoker.base.errors import InvalidRequest, ModelFilesError
from stoker.base.volatile_lines import VOLATILE_LINES
from stoker.gateway.api.client_body import EndpointKind, RequestEnvelope
from stoker.gateway.prefix.conversation_keys import ConversationKeys
from stoker.gateway.prefix.long_body import decode_body
from stoker.gateway.prefix.prefix_keys import root_key, token_keys
from stoker.gateway.prefix.prefix_memo import PrefixMemo
from stoker.kv.blocks.keys import salt_hash
from stoker.proto.anthropic.messages import InputMessage, MessagesRequest, MessageTool
from stoker.proto.anthropic.to_chat import to_chat
from stoker.proto.openai.chat import ChatRequest, Message
from stoker.proto.openai.completions import CompletionRequest
from stoker.proto.openai.responses import InputItem, ResponsesRequest
from stoker.proto.openai.tools import FlatTool, Tool
from stoker.text.conversation import (
    Conversation,
    chat_conversation,
    completion_prompts,
    is_constrained,
    render_text,
    responses_conversation,
    stable_conversation,
)
from stoker.text.folder import text_digest
from stoker.text.response_tools import responses_tools
from stoker.text.template import ChatTemplate
from stoker.text.tokenizer import Tokenizer
from stoker.text.tools import chat_tools

_ANY_NUMBER_OF_TOOLS = 1 << 30  # the worker enforces the limit
_MAX_TOKEN_CHARS = 64  # a prompt with more characters per context token than this would not fit; the worker refuses it
_MAX_TOKEN_ID = (1 << 32) - 1


_CHAT_LISTS: dict[str, type[msgspec.Struct]] = {"messages": Message, "tools": Tool}
_MESSAGES_LISTS: dict[str, type[msgspec.Struct]] = {"messages": InputMessage, "tools": MessageTool}
_RESPONSES_LISTS: dict[str, type[msgspec.Struct]] = {"input": InputItem, "tools": FlatTool}


@dataclass(frozen=True, slots=True)
class TokenText:
    """A model's tokenizer and chat template. `digest` identifies the files they were read from."""

    tokenizer: Tokenizer
    template: ChatTemplate
    digest: str

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> TokenText:
        """Load from the files in a worker's answer to `GET /stoker/tokenizer`."""
        with tempfile.TemporaryDirectory(prefix="stoker-tokenizer-") as name:
            folder = Path(name)
            for file, text in files.items():
                path = PurePosixPath(file)
                if path.is_absolute() or not set(path.parts[:-1]) <= {"additional_chat_templates"}:
                    raise ModelFilesError(
                        f"a worker's tokenizer contains {file!r}, which is not a valid tokenizer file"
                    )
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
            return cls.from_folder(folder, text_digest(dict(files)))

    @classmethod
    def from_folder(cls, folder: Path, digest: str = "") -> TokenText:
        tokenizer = Tokenizer.from_folder(folder)
        return cls(tokenizer, ChatTemplate.from_folder(folder, tokenizer), digest)


class TokenPrefixKeys:
    """Computes exact prefix keys with a model's tokenizer."""

    def __init__(
        self,
        text: TokenText,
        block_tokens: int,
        max_model_tokens: int | None = None,
        volatile_lines: Sequence[str] = VOLATILE_LINES,
    ) -> None:
        self.block_tokens = block_tokens
        self.digest = text.digest
        self._text = text
        self._volatile_lines = volatile_lines
        self._memo = PrefixMemo(text.tokenizer, block_tokens)
        self._max_chars = None if max_model_tokens is None else _MAX_TOKEN_CHARS * max_model_tokens

    def keys(self, envelope: RequestEnvelope, salt: str | None = None) -> ConversationKeys:
        root = root_key(salt_hash(salt) if salt else None)
        match envelope.kind:
            case EndpointKind.COMPLETIONS:
                return self._of_completion(decode_body(CompletionRequest, envelope.raw, {}), root)
            case EndpointKind.CHAT:
                chat = decode_body(ChatRequest, envelope.raw, _CHAT_LISTS)
                given, conversation = chat.prompt_token_ids, _of_chat(chat)
            case EndpointKind.RESPONSES:
                response = decode_body(ResponsesRequest, envelope.raw, _RESPONSES_LISTS)
                given, conversation = response.prompt_token_ids, _of_response(response)
            case EndpointKind.MESSAGES:
                chat = to_chat(decode_body(MessagesRequest, envelope.raw, _MESSAGES_LISTS))
                given, conversation = chat.prompt_token_ids, _of_chat(chat)
        if given is not None:
            return self._of_ids(given, root)
        assert conversation is not None
        conversation = stable_conversation(conversation, self._volatile_lines)
        rendered = render_text(self._text.template, conversation)
        self._bound(len(rendered))
        keys, num_tokens = self._memo.blocks(rendered, root)
        return ConversationKeys(keys, self.block_tokens, num_tokens)

    def _of_completion(self, body: CompletionRequest, root: int) -> ConversationKeys:
        """Return the keys of the first prompt and the tokens of all: several prompts go to one worker together."""
        first: ConversationKeys | None = None
        num_tokens = 0
        for _, prompt in completion_prompts(body):
            if isinstance(prompt, str):
                self._bound(len(prompt))
                specials = body.add_special_tokens is not False
                found = self._of_ids(self._text.tokenizer.encode(prompt, add_special_tokens=specials), root)
            else:
                found = self._of_ids(prompt, root)
            first = first or found
            num_tokens += found.num_tokens
        assert first is not None
        return ConversationKeys(first.keys, self.block_tokens, num_tokens)

    def _of_ids(self, token_ids: list[int], root: int) -> ConversationKeys:
        if token_ids and max(token_ids) > _MAX_TOKEN_ID:
            raise InvalidRequest(f"token id {max(token_ids)} is larger than {_MAX_TOKEN_ID}, the largest possible id")
        return ConversationKeys(
            token_keys(array("I", token_ids), root, self.block_tokens), self.block_tokens, len(token_ids)
        )

    def _bound(self, num_chars: int) -> None:
        if self._max_chars is not None and num_chars > self._max_chars:
            raise InvalidRequest(
                f"the prompt has {num_chars} characters; at most {self._max_chars} can fit the context"
            )


def _of_chat(body: ChatRequest) -> Conversation | None:
    """Return the conversation of a chat request, or None if it has token ids instead."""
    if body.prompt_token_ids is not None:
        return None
    tools = chat_tools(body, _ANY_NUMBER_OF_TOOLS)
    return chat_conversation(body, tools, is_constrained(body, body.response_format, tools))


def _of_response(body: ResponsesRequest) -> Conversation | None:
    if body.prompt_token_ids is not None:
        return None
    tools = responses_tools(body, _ANY_NUMBER_OF_TOOLS).plan
    form = body.text.format if body.text else None
    return responses_conversation(body, tools, is_constrained(body, form, tools))
