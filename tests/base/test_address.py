from __future__ import annotations

import pytest

from stoker.base.address import join_address, local_host, split_address


@pytest.mark.parametrize(("host", "address"), [("10.0.0.1", "10.0.0.1:80"), ("::1", "[::1]:80"), ("box", "box:80")])
def test_what_was_joined_comes_apart_again(host: str, address: str) -> None:
    assert join_address(host, 80) == address
    assert split_address(address) == (host, 80)


def test_who_listens_everywhere_is_reached_here() -> None:
    assert {local_host(host) for host in ("0.0.0.0", "::", "")} == {"127.0.0.1"}
    assert local_host("10.0.0.1") == "10.0.0.1"
