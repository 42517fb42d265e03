from __future__ import annotations

import pytest

from stoker.base.address import host_of_url, join_address, local_host, split_address
from stoker.base.errors import ConfigError


@pytest.mark.parametrize(("host", "address"), [("10.0.0.1", "10.0.0.1:80"), ("::1", "[::1]:80"), ("box", "box:80")])
def test_a_joined_address_is_split_into_its_parts(host: str, address: str) -> None:
    assert join_address(host, 80) == address
    assert split_address(address) == (host, 80)


def test_a_server_on_all_interfaces_is_reached_on_localhost() -> None:
    assert {local_host(host) for host in ("0.0.0.0", "::", "")} == {"127.0.0.1"}
    assert local_host("10.0.0.1") == "10.0.0.1"


def test_a_url_has_a_host() -> None:
    assert host_of_url("--url", "http://box:80/v1") == "box"
    assert host_of_url("--url", "https://[::1]") == "::1"


@pytest.mark.parametrize(
    "url", ["", "box", "box:80", "ftp://box", "http://:80", "http://[::1", "http://box:x", "http://box:99999"]
)
def test_an_invalid_url_is_refused_with_the_name_of_its_option(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--gateway .*: expected a URL such as http://10\.0\.0\.7:8000"):
        host_of_url("--gateway", url)
