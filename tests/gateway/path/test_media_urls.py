"""Clients cannot point a foreign engine to URLs, local files, or what another tenant sent."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from mocks import answers
from world import PATIENT, World

from stoker.base.errors import ConfigError, InvalidRequest
from stoker.gateway.api.client_body import EndpointKind, parse
from stoker.gateway.path.dialects.media_urls import MAX_KEYS, check_media
from stoker.gateway.path.proxy_settings import ProxySettings

ANSWER = {"id": "c", "object": "chat.completion", "choices": []}
PNG = "data:image/png;base64,iVBORw0KGgo="
INSIDE = "http://169.254.169.254/latest/meta-data"


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "See:"}, *parts]}]}


def part(url: Any, kind: str = "image_url") -> dict[str, Any]:
    return {"type": kind, kind: url}


def refused(body: dict[str, Any] | bytes, hosts: tuple[str, ...] = ()) -> str | None:
    """Return the error for a body, or None if it passes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        check_media(parse(EndpointKind.CHAT, raw), hosts)
    except InvalidRequest as error:
        return error.message
    return None


@pytest.mark.parametrize("dialect", ["vllm", "vllm_mooncake", "sglang", "openai"])
def test_a_url_never_reaches_a_foreign_engine(dialect: str) -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("w", answers(ANSWER), dialect=dialect)
            got = await world.ask(chat(part({"url": INSIDE})))
            error = json.loads(got.body)["error"]
            assert (got.status, error["param"], error["code"]) == (400, "messages", "invalid_value")
            assert "'image_url.url' must be a data: URL" in error["message"]
            assert worker.bodies == []
            assert (await world.ask(chat(part({"url": PNG})))).status == 200
            assert len(worker.bodies) == 1

    asyncio.run(main())


def test_the_operator_can_allow_hosts() -> None:
    async def main() -> None:
        async with World(proxy=ProxySettings(connect_s=PATIENT.connect_s, media_hosts=("img.example.com",))) as world:
            worker = await world.add("w", answers(ANSWER), dialect="vllm")
            assert (await world.ask(chat(part({"url": "https://img.example.com/a.png"})))).status == 200
            got = await world.ask(chat(part({"url": INSIDE})))
            assert got.status == 400
            assert "one of these hosts: img.example.com." in json.loads(got.body)["error"]["message"]
            assert len(worker.bodies) == 1

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url", "file_url"])
@pytest.mark.parametrize(
    "url", [INSIDE, "file:///etc/passwd", "/etc/logo.png", " data:x", "DATA:x", "HTTP://a/", "//a/b", "", "gopher://a"]
)
def test_other_urls_are_refused_wherever_they_are(kind: str, url: str) -> None:
    assert refused(chat(part({"url": url}, kind))) is not None
    assert refused(chat(part({"detail": "low", "url": url, "n": 1}, kind))) is not None
    assert refused(chat(part(url, kind))) is not None
    assert refused(chat(part([url], kind))) is not None
    assert refused(chat(part({"deep": {"url": url}}, kind))) is not None
    item = {"role": "user", "content": [{"type": "input_image", kind: url}]}
    assert refused({"model": "m", "input": [item]}) is not None
    assert refused(chat(part({"url": PNG}), part({"url": url}, kind))) is not None


@pytest.mark.parametrize(
    "sent",
    [
        '"image\\u005furl":{"url":"http://a/"}',
        '"\\u0069mage_url":{"url":"http://a/"}',
        '"image_url":{"\\u0075rl":"http://a/"}',
        '"image_url" \n\t:\r {  "url"  :  "http://a/" }',
        '"image_url":{"url":"data:x","url":"http://a/"}',
        '"image_url":{"url":"http:\\/\\/a\\/"}',
        '"image_url":{"url":"data:\\"","url":"http://a/"}',
        '"image_url":{"d":"}","url":"http://a/"}',
        '"image_url":{"d":"\\"","url":"http://a/"}',
        '"image_url":{"d":"\\\\","url":"http://a/"}',
        '"image_url":null,"image_url":"http://a/"',
        '"image_url":{"url":["http://a/"]}',
    ],
    ids=str,
)
def test_a_url_cannot_be_hidden(sent: str) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url",%b}]}]}' % sent.encode()
    json.loads(body)
    assert refused(body) is not None


@pytest.mark.parametrize("name", ["uuid", "image_embeds", "audio_embeds"])
def test_cached_media_and_tensors_are_refused(name: str) -> None:
    assert "may not be sent by clients" in (refused(chat({"type": "image_url", "image_url": None, name: "x"})) or "")
    assert refused(chat({"type": "image_url", "image_url": {"url": PNG}, name: None})) is None


def test_ordinary_requests_pass() -> None:
    schema = {"type": "object", "properties": {"image_url": {"type": "string"}, "server_url": {"type": "string"}}}
    cited = {"type": "output_text", "text": "x", "annotations": [{"type": "url_citation", "url": "https://a/"}]}
    for body in (
        chat(part({"url": PNG, "detail": "low"}), part(PNG, "video_url")),
        chat({"type": "text", "text": 'my "image_url": "http://a/" and \\"image_url\\": {"url": "http://a"}'}),
        chat({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        chat({"type": "file", "file": {"file_data": PNG, "filename": "a.pdf"}}),
        chat({"type": "text", "text": "caf\u00e9 \u005f image_url"}),
        chat() | {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
        {"model": "m", "input": [{"role": "assistant", "content": [cited]}]},
        {"model": "m", "input": "the image_url"},
    ):
        assert refused(body) is None


def test_remote_tools_are_refused() -> None:
    tool = {"type": "mcp", "server_label": "x", "server_url": INSIDE}
    assert "'tools': 'server_url' must be" in (refused({"model": "m", "input": "x", "tools": [tool]}) or "")


@pytest.mark.parametrize(
    ("url", "passes"),
    [
        ("https://img.example.com/a.png?x=1#y", True),
        ("http://IMG.example.com", True),
        ("https://img.example.com:443/a", True),
        ("https://img.example.com:8443/a", True),
        ("https://img.example.com:8444/a", False),
        ("https://img.example.com.evil.com/", False),
        ("https://img.example.com@evil.com/", False),
        ("https://evil.com/img.example.com", False),
        ("https://evil.com\\@img.example.com/", False),
        ("https://img.example.com\\@evil.com/", False),
        ("https://img.example.com/\\\\evil", False),
        ("https://evil.com#@img.example.com/", False),
        ("https://img.example.com\n.evil.com/", False),
        ("ftp://img.example.com/", False),
        ("file://img.example.com/etc/passwd", False),
        ("https:/img.example.com/", False),
        ("https://img.example.com/" + "a" * 9000, False),
    ],
    ids=str,
)
def test_hosts_are_compared_exactly(url: str, passes: bool) -> None:
    message = refused(chat(part({"url": url})), ("img.example.com", "img.example.com:8443"))
    assert (message is None) == passes


@pytest.mark.parametrize("host", ["", "http://a", "a/b", "A.com", "user@a", "a b", "*", "a:0", "a:99999999"])
def test_a_wrong_host_in_the_settings_is_an_error(host: str) -> None:
    with pytest.raises(ConfigError, match="media_hosts"):
        ProxySettings(media_hosts=(host,))


def test_hostile_bodies_are_searched_in_bounded_time() -> None:
    many = b'{"model":"m","messages":[%b]}' % b",".join([b'"_url"'] * (MAX_KEYS + 1))
    assert "at most" in (refused(many) or "")
    for filler in (b"a" * (8 << 20), b"_url" * (2 << 20), b'\\"_url' * (1 << 20), b"\\u005f" * (1 << 18)):
        body = b'{"model":"m","messages":[{"content":[{"image_url":{"d":"%b","url":"data:%b"}}]}]}' % (
            filler,
            b"A" * (8 << 20),
        )
        began_s = time.perf_counter()
        refused(body)
        assert time.perf_counter() - began_s < 5
