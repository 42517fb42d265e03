"""The flags of `stoker serve`: the settings that they become, and the errors before a model is loaded."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.base.config import EngineSettings, HandoffSettings, KvSettings, SchedSettings, StoreSettings
from stoker.base.settings import declared
from stoker.cli import serve
from stoker.cli.main import main
from stoker.cli.serve import small_kv_warning
from stoker.cli.serve_settings import (
    SECTIONS,
    EndpointSettings,
    MembershipSettings,
    ServerSettings,
    ServeSettings,
    TextSettings,
    for_network,
    serve_settings,
)


def parse(*words: str) -> ServeSettings:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve_settings(parser.parse_args(words))


def test_without_flags_all_settings_have_their_defaults() -> None:
    defaults = ServeSettings()
    handoff = replace(defaults.engine.handoff, serves=True)  # requests of a worker with one rank can move
    assert parse() == replace(defaults, engine=replace(defaults.engine, handoff=handoff))


PEER_KEY = "bb19e619692e97fd422805f4ea68381b8b8aec9392723b1070bfdd1d5ba61450"  # derived from "sesame"


def test_every_flag_becomes_its_setting() -> None:
    settings = parse(
        *("--host", "::", "--port", "9", "--role", "decode", "--served-name", "a", "--served-name", "b"),
        *("--device", "cpu", "--dtype", "float64", "--max-model-tokens", "1", "--threads", "2", "--steps-ahead", "0"),
        *("--cpu-weights", "float32", "--drafter", "ngram", "--numerics", "fast"),
        *("--spare-engine", "off", "--kernel-archive", "/z.zip", "--kv-dtype", "bfloat16"),
        *("--block-tokens", "3", "--kv-blocks", "4", "--kv-memory-gib", "5", "--gpu-memory-gib", "6"),
        *("--kv-mean-tokens", "9000"),
        *("--step-tokens", "7", "--max-rows", "8", "--target-itl-ms", "9"),
        *("--kv-host-gib", "2", "--kv-store", "s", "--kv-disk", "/d", "--kv-disk-gib", "3", "--kv-disk-key-file", "/k"),
        *("--kv-mooncake", "m:50051", "--kv-mooncake-segment-gib", "4", "--kv-mooncake-protocol", "rdma"),
        *(
            "--kv-mooncake-ssd",
            "/ssd",
            "--kv-tier",
            "x,gib=2",
            "--kv-tier",
            "y",
            "--kv-port",
            "7",
            "--kv-transports",
            "tcp,local",
            "--kv-lease-s",
            "1.5",
        ),
        *("--tool-format", "t", "--reasoning-format", "none", "--max-body-mib", "1.5", "--max-open", "3"),
        *("--engine-silent-s", "2.5", "--step-timeout-s", "60"),
        *("--drain-s", "0", "--no-move", "--cache-dir", "/c", "--offline", "--log-level", "debug", "--timeline"),
        *("--strict", "--volatile-line", "x:", "--volatile-line", "y:", "--cors-origin", "https://a.example"),
        *("--gateway", "http://a,http://b", "--gateway", "http://c", "--advertise", "http://d"),
        *("--gateway-file", "/g"),
        *("--secret-file", "/s", "--api-key-file", "/a", "--insecure", "--events-port", "65534", "--no-events"),
    )
    store = StoreSettings("s", 2, "/d", 3, "/k", "m:50051", "127.0.0.1", 4, "rdma", "/ssd", ("x,gib=2", "y"))
    handoff = HandoffSettings("127.0.0.1", 7, ("tcp", "local"), None, 1.5, True)
    engine = EngineSettings(
        "cpu",
        "float64",
        "float32",
        "ngram",
        "fast",
        1,
        2,
        0,
        "off",
        "/z.zip",
        KvSettings(3, 4, 5, 9000, 6, "bfloat16"),
        SchedSettings(7, 8, 9),
        store,
        handoff,
    )
    gateways = ("http://a", "http://b", "http://c")
    assert settings == ServeSettings(
        EndpointSettings("::", 9, "decode", ("a", "b")),
        engine,
        TextSettings("t", "none"),
        ServerSettings(
            1.5, 3, 2.5, 60.0, 0, True, Path("/c"), True, "debug", True, True, ("x:", "y:"), ("https://a.example",)
        ),
        MembershipSettings(gateways, Path("/g"), "http://d", Path("/s"), Path("/a"), True, 65534, True),
    )
    network = for_network(engine, "h", "sesame")
    assert (network.store.mooncake_host, network.handoff.host, network.handoff.secret) == ("h", "h", PEER_KEY)


def test_every_setting_is_in_one_section_of_the_help() -> None:
    listed = [one for section in SECTIONS for one in section.settings]
    assert sorted(one.key for one in listed) == sorted(one.key for one in declared(ServeSettings))


def test_a_leading_tilde_is_replaced_by_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    settings = parse("--kv-disk=~/kv", "--kv-disk-key-file=~/key", "--cache-dir=~/cache", "--secret-file=~/secret")
    store = settings.engine.store
    assert (store.disk_dir, store.disk_key_file) == ("/home/me/kv", "/home/me/key")
    assert settings.server.cache_dir == Path("/home/me/cache")
    assert settings.membership.secret_file == Path("/home/me/secret")


@pytest.mark.parametrize(
    ("words", "serves"),
    [
        ((), True),
        (("--role", "decode"), True),
        (("--role", "prefill"), True),
        (("--tp", "2"), False),
        (("--tp", "2", "--kv-port", "0"), True),  # the engine refuses it
    ],
    ids=str,
)
def test_workers_of_one_rank_serve_kv(words: tuple[str, ...], serves: bool) -> None:
    assert parse(*words).engine.handoff.serves is serves


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-store", "s"), "--kv-store has no effect without --kv-host-gib: give both"),
        (("--kv-disk-gib", "3"), "--kv-disk-gib has no effect without --kv-disk"),
        (("--kv-disk-key-file", "k"), "--kv-disk-key-file has no effect without --kv-disk"),
        (("--kv-mooncake-ssd", "d"), "--kv-mooncake-ssd has no effect without --kv-mooncake"),
        (("--kv-host-gib", "-1"), "--kv-host-gib -1: give a number of GiB, at least 0"),
        (("--kv-disk", "d", "--kv-disk-gib", "0"), "--kv-disk-gib 0: give a number of GiB above 0"),
        (("--kv-lease-s", "nan"), "--kv-lease-s nan: give a number of seconds above 0"),
        (("--kv-port", "70000"), "--kv-port 70000: give a whole number from 0 to 65535"),
        (("--kv-transports", "tcp,"), "--kv-transports tcp,: give names separated by commas"),
        (("--kv-mooncake", "host"), "--kv-mooncake host: give HOST:PORT"),
        (("--dtype", "int8"), "--dtype int8: give float32, bfloat16, float16 or float64"),
        (("--card-memory-gib", "20"), "--card-memory-gib was renamed: use --gpu-memory-gib"),
        (("--card-memory-gib=20",), "--card-memory-gib was renamed: use --gpu-memory-gib"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_flag_is_refused_by_name(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/no/such/model", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kv", "kv_tokens", "said"),
    [
        (KvSettings(), 320, None),
        (KvSettings(num_blocks=20), 320, "with --kv-blocks 20 the KV cache holds 320 tokens. No sequence"),
        (
            KvSettings(num_blocks=600),
            9600,
            "Only 1.2 sequences of the maximum length (8,192 tokens) fit. Raise --kv-blocks, or lower",
        ),
        (KvSettings(memory_gib=0.01), 100, "can be longer. Raise --kv-memory-gib."),
        (KvSettings(gpu_memory_gib=3), 100, "Raise --gpu-memory-gib"),
        (KvSettings(num_blocks=6000), 96_000, None),
    ],
    ids=str,
)
def test_a_tiny_kv_cache_is_announced_with_a_warning(kv: KvSettings, kv_tokens: int, said: str | None) -> None:
    warning = small_kv_warning(kv, kv_tokens, min(8192, kv_tokens))
    assert warning is None if said is None else said in str(warning)
