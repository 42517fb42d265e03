"""The white space of an output is guessed to be what the output wrote last."""

from __future__ import annotations

from stoker.engine.process.grammars.white_space_style import WhiteSpaceStyle


def style_of(text: bytes) -> WhiteSpaceStyle:
    style = WhiteSpaceStyle()
    for i in range(0, len(text), 3):  # tokens end anywhere
        style.read(text[i : i + 3])
    return style


def test_before_any_output_one_space_follows_colons_and_commas() -> None:
    style = WhiteSpaceStyle()
    assert style.before(b'":', b"3") == b" "
    assert style.before(b",", b'"') == b" "
    assert style.before(b"{", b'"') == b""
    assert style.before(b"3", b"}") == b""


def test_compact_output_stays_compact() -> None:
    style = style_of(b'{"a":1,"b":2')
    assert style.before(b",", b'"') == style.before(b":", b"1") == b""


def test_properties_on_lines_of_their_own_stay_so() -> None:
    style = style_of(b'{\n    "a": 1')
    assert style.before(b",", b'"') == b"\n    "
    assert style.before(b":", b"1") == b" "
    assert style.before(b"1", b"}") == b"\n"


def test_strings_do_not_count() -> None:
    style = style_of(b'{"a": "x,y:  z{ \\" ,  ", "b": 1')
    assert style.before(b",", b'"') == b" "
    assert style.before(b"{", b'"') == b""
