"""OpenAI's request field `prediction`: a text that the client expects in the answer."""

from __future__ import annotations

from typing import Literal

import msgspec

from stoker.proto.openai.fields import ContentPart


class PredictedOutput(msgspec.Struct, kw_only=True):
    type: Literal["content"] = "content"
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        """The whole predicted text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)
