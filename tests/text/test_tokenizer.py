"""Encoding with a warm cache gives the same ids as without; errors in a folder name the file."""

from __future__ import annotations

import functools
import gzip
import json
import os
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import CORPUS, MARKS, byte_level, sentence_piece
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

from stoker.base.errors import InvalidRequest, ModelFilesError
from stoker.text.segments import newline_settles
from stoker.text.tokenizer import Tokenizer

AGENTIC = Path(__file__).parents[2].parent / "shared" / "data" / "agentic"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
FLAGGED = ["<mask>", "<tail>", "<mid>", "<|im_start|>x", "[norm]", " <space>"]


def _split_by(raw: tokenizers.Tokenizer, *expressions: str) -> tokenizers.Tokenizer:
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    byte_steps = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_steps])
    return raw


def _with_nfc(raw: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    raw.normalizer = normalizers.NFC()
    return raw


def _with_prefix_space() -> tokenizers.Tokenizer:
    raw = byte_level()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return raw


def _with_bos() -> tokenizers.Tokenizer:
    raw = byte_level()
    raw.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>",
        special_tokens=[(mark, raw.token_to_id(mark)) for mark in ("<|endoftext|>", "<|im_end|>")],
    )
    return raw


def _legacy_llama() -> tokenizers.Tokenizer:
    raw = sentence_piece("never")
    raw.pre_tokenizer = None
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return raw


SPACED = [
    AddedToken("<mask>", lstrip=True, normalized=False),
    AddedToken("<tail>", rstrip=True, normalized=False),
    AddedToken("<mid>", lstrip=True, rstrip=True, normalized=True),
    AddedToken("<|im_start|>x", normalized=False),
    AddedToken("[norm]", normalized=True),
    AddedToken(" <space>", normalized=False),
]
RAW = {
    "smollm": byte_level(),
    "spaced": byte_level(SPACED),
    "single_word": byte_level([AddedToken("[norm]", single_word=True, normalized=False)]),
    "single_word_normalized": byte_level([AddedToken("[norm]", single_word=True, normalized=True)]),
    "prefix_space": _with_prefix_space(),
    "bos": _with_bos(),
    "llama3": _split_by(byte_level(), LLAMA3),
    "qwen2": _with_nfc(_split_by(byte_level(), LLAMA3.replace("{1,3}", ""))),
    "deepseek": _split_by(byte_level(), *DEEPSEEK),
    "metaspace_first": sentence_piece("first"),
    "metaspace_always": sentence_piece("always"),
    "metaspace_never": sentence_piece("never"),
    "legacy_llama": _legacy_llama(),
}
WARM = {name: Tokenizer(raw, cache_bytes=50_000) for name, raw in RAW.items()}

words = st.sampled_from(
    [*MARKS, *FLAGGED, *CORPUS[:4], "<|im_", "end|>", "<", "user\n", "\n", "\n\n", " ", "  ", "\t\n"]
)
unicode_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
odd = st.text(alphabet="ab'sZ0129 \n\r\t\u00a0\u0301é<|>._-:", max_size=10)
texts = st.lists(st.one_of(words, words, unicode_text, odd), max_size=25).map("".join)


@pytest.mark.parametrize("name", RAW)
@settings(max_examples=60, deadline=None, print_blob=True)
@given(text=texts, add_special_tokens=st.booleans())
def test_a_warm_cache_gives_the_same_ids(name: str, text: str, add_special_tokens: bool) -> None:
    expected = RAW[name].encode(text, add_special_tokens=add_special_tokens).ids
    for _ in range(2):
        assert WARM[name].encode(text, add_special_tokens) == expected


@pytest.mark.parametrize("name", ["smollm", "llama3", "qwen2", "deepseek"])
@settings(max_examples=20, deadline=None, print_blob=True)
@given(parts=st.lists(st.one_of(odd, unicode_text, st.sampled_from(CORPUS)), min_size=60, max_size=160))
def test_splitting_a_long_segment_at_newlines_gives_the_same_ids(name: str, parts: list[str]) -> None:
    text = "x" * 2045 + "".join(part + end for part, end in zip(parts, "\n \n\t;" * 32, strict=False))
    assert WARM[name].encode(text) == RAW[name].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["smollm", "llama3", "deepseek"])
@pytest.mark.parametrize("left", ["a", "7", "!", "'", "''", "x ", "\n", ".", ")'s"])
@pytest.mark.parametrize("right", ["a", "7", "!", "'s", "'", "`", "<", "~", "ll", "\u0301", " b"])
def test_all_kinds_of_newlines_give_the_same_ids(name: str, left: str, right: str) -> None:
    text = ("word " * 500 + left + "\n" + right + " more") * 2
    assert WARM[name].encode(text) == RAW[name].encode(text, add_special_tokens=False).ids


def test_a_text_is_split_at_newlines_only_where_this_is_proven_exact() -> None:
    proved = {name for name, raw in RAW.items() if newline_settles(json.loads(raw.to_str()))}
    assert {"smollm", "llama3", "qwen2", "deepseek"} <= proved
    assert not proved & {"prefix_space", "metaspace_first", "metaspace_always", "metaspace_never", "legacy_llama"}


def _turn(role: str, words_: int, seed: int) -> str:
    text = " ".join(f"word{(seed * 31 + place * 7) % 997}" for place in range(words_))
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_a_resent_chat_tokenizes_only_its_new_tail(raw: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(raw)
    chat = "".join(_turn("user" if turn % 2 else "assistant", 150, turn) for turn in range(150))
    ids = tokenizer.encode(chat + "<|im_start|>assistant\n")
    assert len(ids) > 100_000
    before = tokenizer.encoded_chars
    tail = "I see.<|im_end|>\n" + _turn("user", 20, 999)
    again = tokenizer.encode(chat + "<|im_start|>assistant\n" + tail)
    assert tokenizer.encoded_chars - before <= len("<|im_start|>assistant\n") + len(tail)
    assert again == raw.encode(chat + "<|im_start|>assistant\n" + tail, add_special_tokens=False).ids


def test_a_growing_message_tokenizes_only_its_new_lines(raw: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(raw)
    log = "".join(f"{line:05d} GET /index.html took {line * 37 % 1000} ms\n" for line in range(5000))
    tokenizer.encode(log)
    before = tokenizer.encoded_chars
    grown = log + "05000 done\n"
    assert tokenizer.encode(grown) == raw.encode(grown, add_special_tokens=False).ids
    assert tokenizer.encoded_chars - before < 3000


def test_the_cache_stays_within_its_bytes(raw: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(raw, cache_bytes=20_000)
    for seed in range(300):
        tokenizer.encode(_turn("user", 30, seed))
    assert tokenizer._cache._used_bytes <= 20_000


def test_half_a_surrogate_pair_is_an_invalid_request(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="character 3 is half a surrogate pair"):
        tokenizer.encode("abc\ud800")


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>Zürich 🦊 2026<|im_end|>"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.decode(ids) == "Zürich 🦊 2026"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.token_bytes(10**9) == b""


def test_sentence_piece_bytes() -> None:
    tokenizer = WARM["metaspace_first"]
    assert tokenizer.token_bytes(tokenizer.token_id("<0xE7>") or -1) == b"\xe7"
    assert any(tokenizer.token_bytes(token).startswith(b" ") for token in range(tokenizer.vocab_size))
    assert tokenizer.token_bytes(tokenizer.token_id("<|im_end|>") or -1) == b"<|im_end|>"


@pytest.fixture
def folder(tmp_path: Path, raw: tokenizers.Tokenizer) -> Path:
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    return tmp_path


def test_a_folder_defines_special_tokens_and_eos_ids(folder: Path, raw: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.eos_token_ids == (3, 5, raw.token_to_id("<|im_end|>"))
    assert tokenizer.special_ids == {raw.token_to_id(mark) for mark in MARKS[:3]}
    assert tokenizer.fingerprint == Tokenizer.from_folder(folder).fingerprint


def test_a_token_that_is_only_in_tokenizer_config_is_added(folder: Path) -> None:
    size = Tokenizer.from_folder(folder).vocab_size
    declared = {str(size): {"content": "<|tool|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    assert Tokenizer.from_folder(folder).encode("a<|tool|>")[-1] == size
    declared = {str(size + 7): {"content": "<|tool|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    with pytest.raises(ModelFilesError, match=r"tokenizer_config\.json gives '<\|tool\|>'"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_a_corrupt_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text('{"half": ')
    with pytest.raises(ModelFilesError, match=name.replace(".", r"\.")):
        Tokenizer.from_folder(folder)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)


def test_an_unsupported_decoder_is_refused() -> None:
    raw = byte_level()
    raw.decoder = decoders.WordPiece()
    with pytest.raises(ModelFilesError, match="WordPiece"):
        Tokenizer(raw)


@pytest.mark.skipif("STOKER_TEST_MODEL" not in os.environ, reason="STOKER_TEST_MODEL names no model folder")
@settings(max_examples=200, deadline=None, print_blob=True)
@given(text=texts)
def test_a_real_model_folder(text: str) -> None:
    tokenizer, raw = _real_model(os.environ["STOKER_TEST_MODEL"])
    ids = raw.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == raw.decode(ids)


@functools.cache
def _real_model(folder: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return Tokenizer.from_folder(Path(folder)), tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")


@pytest.mark.skipif(not AGENTIC.is_dir(), reason="the public conversations are not here")
def test_real_conversations_turn_by_turn(raw: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(raw)
    for file in sorted(AGENTIC.glob("*.jsonl.gz")):
        with gzip.open(file, "rt") as lines:
            rows = [json.loads(line) for line, _ in zip(lines, range(3), strict=False)]
        for row in rows:
            text = ""
            for message in row["messages"]:
                text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
                assert tokenizer.encode(text) == raw.encode(text, add_special_tokens=False).ids
