"""`stoker serve`'s flags for tiers and hand-offs: what becomes of them, and what is refused before a model is loaded."""

from __future__ import annotations

import argparse

import pytest

from stoker.base.config import HandoffSettings, StoreSettings
from stoker.cli import serve
from stoker.cli.kv_options import check_kv_arguments, handoff_settings, store_settings
from stoker.cli.main import main


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(words)
    check_kv_arguments(args)
    return args


def test_without_flags_nothing_is_kept() -> None:
    args = parse()
    assert store_settings(args, "127.0.0.1") == StoreSettings()
    assert handoff_settings(args, "127.0.0.1", None) == HandoffSettings()


def test_every_flag_has_its_setting() -> None:
    args = parse(
        *("--kv-host-gib", "2", "--kv-store", "s", "--kv-disk", "/d", "--kv-disk-gib", "3", "--kv-disk-key-file", "/k"),
        *("--kv-mooncake", "m:50051", "--kv-mooncake-segment-gib", "4", "--kv-mooncake-protocol", "rdma"),
        *("--kv-mooncake-ssd", "/ssd", "--kv-port", "7", "--kv-transports", "tcp,local", "--kv-lease-s", "1.5"),
    )
    assert store_settings(args, "h") == StoreSettings("s", 2, "/d", 3, "/k", "m:50051", "h", 4, "rdma", "/ssd")
    assert handoff_settings(args, "h", "sesame") == HandoffSettings("h", 7, ("tcp", "local"), "sesame", 1.5, True)


def test_a_home_that_no_shell_has_filled_in_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    args = parse("--kv-disk=~/kv", "--kv-disk-key-file=~/key", "--cache-dir=~/cache", "--secret-file=~/secret")
    settings = store_settings(args, "h")
    assert (settings.disk_dir, settings.disk_key_file) == ("/home/me/kv", "/home/me/key")
    assert [str(path) for path in (args.cache_dir, args.secret_file)] == ["/home/me/cache", "/home/me/secret"]


@pytest.mark.parametrize(
    ("words", "serves"),
    [
        ((), False),
        (("--role", "decode"), False),
        (("--role", "prefill"), True),
        (("--kv-port", "0"), True),
        (("--role", "decode", "--kv-port", "0"), True),
    ],
    ids=str,
)
def test_who_keeps_kv_for_others(words: tuple[str, ...], serves: bool) -> None:
    assert handoff_settings(parse(*words), "h", None).serves is serves


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-store", "s"), "--kv-store needs --kv-host-gib"),
        (("--kv-disk-gib", "3"), "--kv-disk-gib needs --kv-disk"),
        (("--kv-disk-key-file", "k"), "--kv-disk-key-file needs --kv-disk"),
        (("--kv-mooncake-ssd", "d"), "--kv-mooncake-ssd needs --kv-mooncake"),
        (("--kv-host-gib", "0"), "--kv-host-gib 0: it must be above zero"),
        (("--kv-lease-s", "nan"), "--kv-lease-s nan: it must be above zero"),
        (("--kv-port", "70000"), "--kv-port 70000: a port is 0 to 65535"),
        (("--kv-transports", "tcp,"), "--kv-transports 'tcp,'"),
        (("--kv-mooncake", "host"), "--kv-mooncake host: HOST:PORT is expected"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_meant(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model", *words]) == 2
    assert message in capsys.readouterr().err
