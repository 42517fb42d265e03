"""Encode and decode with the tokenizer of a model's folder, tokenizing only what it has not seen.

It owns the `tokenizers` object, the table of token bytes and the cache of segments. It refuses to know chat templates,
requests and which text is trusted: a special token's text is that token, wherever it stands.
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
from stoker.text.vocabulary import build_vocabulary

_CACHE_BYTES = 256 << 20
_PROBES = ("a", "b c")


class Tokenizer:
    """Text <-> token ids of one model. `encode` may be called from several threads."""

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        # A tokenizer file may carry the truncation of its training run: a prompt is never cut here.
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
        self.encoded_chars = 0  # characters that were really tokenized: the rest came from the cache

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        file = path / "tokenizer.json"
        text = read_text(file)
        if text is None:
            raise ModelFilesError(f"{file} is missing: the tokenizer is read from it; put the model's own file there")
        try:
            raw = tokenizers.Tokenizer.from_str(text)
        except Exception as broken:  # `tokenizers` raises bare Exception for everything
            raise ModelFilesError(f"{file} is corrupt: {broken}; fetch the model's files again") from broken
        settings = read_object(path / "tokenizer_config.json")
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
        """The same ids as tokenizing all of `text` anew."""
        if add_special_tokens and self._frame is None:
            return self._tokenize([text], add_special_tokens=True)[0]
        before, after = self._frame if add_special_tokens and self._frame else ((), ())
        token_ids = list(before)
        for ids in self.encode_pieces(self._splitter.split(text)):
            token_ids.extend(ids)
        token_ids.extend(after)
        return token_ids

    def split(self, text: str) -> list[str]:
        """Pieces whose token ids, one after the other, are the text's. Where a piece begins depends on what stands before,
        and on less than `lookahead` characters after that place."""
        return self._splitter.split(text)

    @property
    def lookahead(self) -> int:
        return max(map(len, self.added_tokens), default=0) + 1

    def encode_pieces(self, pieces: Sequence[str]) -> list[array[int]]:
        """The token ids of each; those seen before are not tokenized again."""
        try:
            keys = [SegmentCache.key(piece) for piece in pieces]
        except UnicodeEncodeError as broken:
            raise InvalidRequest(f"the text has half a surrogate pair at character {broken.start}") from broken
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
        """The token's bytes: often not valid UTF-8 by themselves. Empty for an id that has no token."""
        return self.vocabulary.bytes_of(token_id)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written so in the vocabulary."""
        found: int | None = self._raw.token_to_id(text)
        return found

    def _tokenize(self, pieces: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        self.encoded_chars += sum(map(len, pieces))
        if not pieces:
            return []
        encodings = self._raw.encode_batch_fast(pieces, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]


def _pack(ids: list[int]) -> array[int]:
    return array("I", ids)


def _describe(token: tokenizers.AddedToken) -> AddedToken:
    return AddedToken(token.content, token.normalized, token.lstrip, token.rstrip, token.single_word)


def _frame(raw: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids that the post-processor sets before and after any text; None when it does something else."""
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
    """Added tokens that only tokenizer_config.json names."""
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
                f"{raw.token_to_id(content)}: the two files are not of one model"
            )


def _eos_token_ids(path: Path, raw: tokenizers.Tokenizer, eos_token: str | None) -> list[int]:
    config = read_object(path / "config.json")
    ids = token_ids(read_object(path / "generation_config.json").get("eos_token_id"))
    ids += token_ids(config.get("eos_token_id"))
    nested = config.get("text_config")  # models with several modalities keep their text half there
    if isinstance(nested, dict):
        ids += token_ids(nested.get("eos_token_id"))
    named = raw.token_to_id(eos_token) if eos_token else None
    return ids if named is None else [*ids, named]
