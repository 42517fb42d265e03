"""Which images, videos, audio and files a client may point a foreign engine to. Default: only those inside the request.

vLLM and SGLang fetch the URLs in a conversation themselves, from inside the operator's network, and some of them open
local paths. So only `data:` URLs pass, and http(s) URLs of hosts that the operator listed. Two other things in a content
part are refused: `uuid`, under which vLLM returns the image that another tenant sent with the same one, and tensors.

Bodies can be large, so this searches for the keys and looks at their values, without decoding anything. Inside a JSON
string every quote is escaped, so a name that is followed by a quote and a colon is always a key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NoReturn

import msgspec
from msgspec import UNSET

from stoker.base.errors import InvalidRequest
from stoker.gateway.api.client_body import RequestEnvelope

MAX_KEYS = 4096  # more of them than this are not a conversation, and looking at each takes time
_MAX_URL_BYTES = 8192
_MAX_KEY_BYTES = 64  # in error messages

_URL_KEY = b'_url"'  # the end of `image_url`, `video_url`, `audio_url`, `file_url`
_REFUSED_KEYS = (b'"uuid"', b'_embeds"')
_SERVER_KEY = b'"server_url"'
_BACKSLASH = b"\\"  # searching one byte is much faster than searching two
_ESCAPE = b"\\u00"  # starts the escapes of ASCII characters, which could hide a key
_ESCAPED = re.compile(rb"\\u00([2-7][0-9a-fA-F])")
_QUOTE_OR_BACKSLASH = (0x22, 0x5C)
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^\"\\{\[\]},]++")
_DATA = b'"data:'
_URL = re.compile(r"(https?)://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?(?:[/?#][!-\[\]-~]*)?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def check_media(envelope: RequestEnvelope, hosts: Collection[str]) -> None:
    """Raise InvalidRequest if the body points an engine to something that is neither in the body nor on one of `hosts`."""
    if envelope.messages is not UNSET and _may_have_media(text := bytes(envelope.messages)):
        _MediaSearch(text, "messages", hosts).check_conversation()
    if envelope.input is not UNSET and _may_have_media(text := bytes(envelope.input)):
        _MediaSearch(text, "input", hosts).check_conversation()
    if envelope.tools is not UNSET:
        _MediaSearch(bytes(envelope.tools), "tools", hosts).check_tools()


def _may_have_media(text: bytes) -> bool:
    """Return False if the text certainly has no content part with media.

    Such a part has an underscore in its type or its key, and most conversations have none.
    """
    return b"_" in text or (_BACKSLASH in text and _ESCAPE in text)


class _MediaSearch:
    """Looks through the JSON of one field."""

    def __init__(self, text: bytes, name: str, hosts: Collection[str]) -> None:
        self._text = _ESCAPED.sub(_unescaped, text) if _BACKSLASH in text and _ESCAPE in text else text
        self._name = name
        self._hosts = hosts
        self._num_keys = 0
        self._data: list[tuple[int, int]] = []  # where the data: URLs are, in order: nothing is searched in them

    def check_conversation(self) -> None:
        for key, at in self._keys(_URL_KEY, 0, len(self._text)):
            self._check_value(key, at)
        begin = 0
        for end, after in [*self._data, (len(self._text), 0)]:
            for wanted in _REFUSED_KEYS:
                for key, _ in self._keys(wanted, begin, end):
                    self._refuse(
                        key, "may not be sent by clients of this gateway. Leave it out and send the data itself."
                    )
            begin = after

    def check_tools(self) -> None:
        """Check the servers of remote tools. In the schema of a function, a property of this name has an object as value."""
        for key, at in self._keys(_SERVER_KEY, 0, len(self._text)):
            if self._text.startswith(b'"', at):
                self._check_url(key, at)

    def _keys(self, wanted: bytes, at: int, until: int) -> Iterator[tuple[str, int]]:
        """Yield the keys that end with these bytes, and where their values begin, unless the values are null."""
        text = self._text
        while (at := text.find(wanted, at, until)) >= 0:
            self._num_keys += 1
            if self._num_keys > MAX_KEYS:
                self._refuse(
                    wanted.decode().strip('"'), f"occurs too often: at most {MAX_KEYS} media keys are allowed."
                )
            past = at + len(wanted)
            colon = _COLON.match(text, past)
            if colon is not None and not text.startswith(b"null", colon.end()):
                begin = text.rfind(b'"', max(0, at - _MAX_KEY_BYTES), past - 1) + 1
                yield text[begin : past - 1].decode("ascii", "replace"), colon.end()
            at = max(past, self._data[-1][1]) if self._data and wanted is _URL_KEY else past

    def _check_value(self, key: str, at: int) -> None:
        first = self._text[at : at + 1]
        if first == b'"':
            self._check_url(key, at)
        elif first == b"{":
            self._check_object(key, at + 1)
        else:
            self._refuse(key, "must be a URL, or an object with a 'url'.")

    def _check_object(self, key: str, at: int) -> None:
        """Check each `url` of an object without nested values. `at` is behind its opening brace."""
        text = self._text
        while True:
            at = _end(_SPACE, text, at)
            name = _STRING.match(text, at)
            if name is None:  # the closing brace, as the gateway has parsed this JSON before
                return
            at = _end(_COLON, text, name.end())
            if name[0] == b'"url"' and not text.startswith(b"null", at):
                at = self._check_url(f"{key}.url", at)
            else:
                value = _STRING.match(text, at) or _SCALAR.match(text, at)
                if value is None:
                    self._refuse(key, "must be a URL, or an object with a 'url' and without nested objects.")
                at = value.end()
            at = _end(_SPACE, text, at)
            if not text.startswith(b",", at):
                return
            at += 1

    def _check_url(self, key: str, at: int) -> int:
        """Check the URL in the string that begins here. Return where the string ends."""
        text = self._text
        if text.startswith(_DATA, at):
            end = text.find(b'"', at + 1)
            if text[end - 1 : end] != b"\\":  # no data: URL contains a quote
                self._data.append((at, end))
                return end + 1
        url = _STRING.match(text, at, at + _MAX_URL_BYTES)
        if url is None or not _is_allowed(url[0], self._hosts):
            self._refuse(key, self._what_passes())
        return url.end()

    def _what_passes(self) -> str:
        if not self._hosts:
            return "must be a data: URL, such as 'data:image/png;base64,...'. This gateway lets no engine fetch other URLs."
        return f"must be a data: URL, or an http(s) URL on one of these hosts: {', '.join(sorted(self._hosts))}."

    def _refuse(self, key: str, why: str) -> NoReturn:
        message = f"Invalid value in '{self._name}': '{key}' {why}"
        raise InvalidRequest(message, param=self._name, code="invalid_value")


def _is_allowed(quoted: bytes, hosts: Collection[str]) -> bool:
    """Return True if a JSON string is a URL on one of the hosts. Anything that parsers could read differently is not."""
    try:
        url = _URL.fullmatch(msgspec.json.decode(quoted, type=str))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    if url is None:
        return False
    scheme, host, port = url.groups()
    if port is None or int(port) == _DEFAULT_PORTS[scheme]:
        return host.lower() in hosts
    return f"{host.lower()}:{int(port)}" in hosts


def _unescaped(escape: re.Match[bytes]) -> bytes:
    code = int(escape[1], 16)
    return escape[0] if code in _QUOTE_OR_BACKSLASH else bytes([code])


def _end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()
