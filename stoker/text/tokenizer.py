"""Encode and decode with a model's tokenizer. Segments of text that were seen before come from a cache.

This module owns the `tokenizers` object, the table of token bytes and the segment cache. It does not know chat templates or
requests. It also does not know which text is trusted: the text of a special token always becomes that token.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from stoker.base.errors import InvalidRequest, ModelFilesError
from stoker.text.detokenizer import Detokenizer
from stoker.text.folder import read_object, read_text, token_ids, token_text
from stoker.text.segments import AddedToken, SegmentCache, Splitter, newline_settles
from stoker.text.tiktoken_file import FILE_NAME as TIKTOKEN_FILE
from stoker.text.tiktoken_file import read_tiktoken
from stoker.text.vocabulary import build_vocabulary

_CACHE_BYTES = 256 << 20
_PROBES = ("a", "b c")


class Tokenizer:
    """The tokenizer of one model. `encode` is thread-safe."""

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        # A tokenizer file may contain the truncation of a training run. Prompts are never truncated here.
        raw.no_truncation()
        raw.no_padding()
        described = raw.to_str()
        spec = json.loads(described)
        if spec.get("decoder") is None and '"ByteLevel"' in json.dumps(spec.get("pre_tokenizer")):
            spec["decoder"] = {"type": "ByteLevel"}
            raw.decoder = decoders.ByteLevel()
        added = raw.get_added_tokens_decoder()
        self._raw = raw
        self._splitter = Splitter([_describe(token) for token in added.values()], newline_settles(spec))
        self._cache = SegmentCache(cache_bytes)
        self._frame = _frame(raw)
        self.vocabulary = build_vocabulary(
            raw.get_vocab(with_added_tokens=False),
            {token_id: token.content for token_id, token in added.items()},
            spec.get("decoder"),
        )
        self.vocab_size = len(self.vocabulary.table)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()
        self.encoded_chars = 0  # number of characters that were tokenized, not found in the cache

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        settings = read_object(path / "tokenizer_config.json")
        raw = _read_raw(path, settings)
        names = read_object(path / "special_tokens_map.json") | settings
        _add_configured(raw, settings.get("added_tokens_decoder"), path / "tokenizer_config.json")
        eos_token = token_text(names.get("eos_token"))
        return cls(
            raw,
            eos_token_ids=_eos_token_ids(path, raw, eos_token),
            bos_token=token_text(names.get("bos_token")),
            eos_token=eos_token,
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`. They are the same as without the cache."""
        if add_special_tokens and self._frame is None:
            return self._tokenize([text], add_special_tokens=True)[0]
        before, after = self._frame if add_special_tokens and self._frame else ((), ())
        token_ids = list(before)
        for ids in self.encode_pieces(self._splitter.split(text)):
            token_ids.extend(ids)
        token_ids.extend(after)
        return token_ids

    def split(self, text: str) -> list[str]:
        """Split `text` so that the concatenated token ids of the pieces are the token ids of the text.

        The start of a piece depends only on the text before it and on fewer than `lookahead` characters after it.
        """
        return self._splitter.split(text)

    @property
    def lookahead(self) -> int:
        return max(map(len, self.added_tokens), default=0) + 1

    def encode_pieces(self, pieces: Sequence[str]) -> list[array[int]]:
        """Return the token ids of each piece. Pieces that were seen before come from the cache."""
        try:
            keys = [SegmentCache.key(piece) for piece in pieces]
        except UnicodeEncodeError as broken:
            raise InvalidRequest(
                f"the text is not valid Unicode: character {broken.start} is half a surrogate pair"
            ) from broken
        found = self._cache.get(keys)
        missing = {keys[place]: pieces[place] for place, ids in enumerate(found) if ids is None}
        fresh = dict(zip(missing, map(_pack, self._tokenize(list(missing.values()))), strict=True))
        for key, ids in fresh.items():
            self._cache.put(key, ids)
        return [known if known is not None else fresh[key] for key, known in zip(keys, found, strict=True)]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        detokenizer = Detokenizer(self, skip_special_tokens)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes, which need not be valid UTF-8; b"" for an id without a token."""
        return self.vocabulary.bytes_of(token_id)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text in the vocabulary, or None."""
        found: int | None = self._raw.token_to_id(text)
        return found

    def _tokenize(self, pieces: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        self.encoded_chars += sum(map(len, pieces))
        if not pieces:
            return []
        encodings = self._raw.encode_batch_fast(pieces, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]


def _read_raw(path: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    text = read_text(file)
    if text is None:
        ranks = read_text(path / TIKTOKEN_FILE)
        if ranks is not None:
            return read_tiktoken(path / TIKTOKEN_FILE, ranks, settings)
        raise ModelFilesError(f"{file} is missing: download the model's own file into this folder")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as broken:  # `tokenizers` raises bare Exception for everything
        raise ModelFilesError(f"{file} is damaged ({broken}): download the model again") from broken


def _pack(ids: list[int]) -> array[int]:
    return array("I", ids)


def _describe(token: tokenizers.AddedToken) -> AddedToken:
    return AddedToken(token.content, token.normalized, token.lstrip, token.rstrip, token.single_word)


def _frame(raw: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the ids that the post-processor adds before and after any text, or None if it does something else."""
    frames = []
    for probe in _PROBES:
        bare = raw.encode(probe, add_special_tokens=False).ids
        full = raw.encode(probe, add_special_tokens=True).ids
        places = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
        if len(places) != 1:
            return None
        frames.append((full[: places[0]], full[places[0] + len(bare) :]))
    return frames[0] if all(frame == frames[0] for frame in frames) else None


def _add_configured(raw: tokenizers.Tokenizer, configured: Any, file: Path) -> None:
    """Add the tokens that only tokenizer_config.json lists."""
    if not isinstance(configured, dict):
        return
    known = {token.content for token in raw.get_added_tokens_decoder().values()}
    for token_id, entry in sorted(configured.items(), key=lambda item: int(item[0])):
        content = token_text(entry)
        if content is None or content in known:
            continue
        flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        token = tokenizers.AddedToken(content, special=bool(entry.get("special", False)), **flags)
        raw.add_tokens([token])
        if raw.token_to_id(content) != int(token_id):
            raise ModelFilesError(
                f"{file} gives {content!r} the id {token_id}, but in tokenizer.json its id would be "
                f"{raw.token_to_id(content)}: the two files are from different models"
            )


def _eos_token_ids(path: Path, raw: tokenizers.Tokenizer, eos_token: str | None) -> list[int]:
    config = read_object(path / "config.json")
    ids = token_ids(read_object(path / "generation_config.json").get("eos_token_id"))
    ids += token_ids(config.get("eos_token_id"))
    nested = config.get("text_config")  # in multimodal models, the text model's config
    if isinstance(nested, dict):
        ids += token_ids(nested.get("eos_token_id"))
    named = raw.token_to_id(eos_token) if eos_token else None
    return ids if named is None else [*ids, named]
