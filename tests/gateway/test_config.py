"""The gateway's settings from a file and the command line, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import ConfigError
from stoker.fleet.spec import Role
from stoker.gateway.config import GatewayConfig, load, read_secret, read_secrets
from stoker.gateway.worker_option import parse_worker, worker_id_of

HASH = "0" * 64

FILE = f"""
admin_token_file = "admin.token"

store = "usage.db"

[listen]
port = 9000

[routing]
policy = "least_tokens"
[routing.cost]
kv_pressure_s = 0.3

[admission]
queue_s = 12

[meter]
flush_rows = 7

[[worker]]
url = "http://a:1"
role = "prefill"
models = ["m"]
labels = {{ zone = "x" }}

[[worker]]
url = "http://b:2/"
dialect = "vllm"
events = "tcp://b:5557"

[[price]]
model = "*"
input = 0.5
cached_input = 0.05
output = 2

[[tenant]]
name = "team-a"
weight = 2

[[key]]
name = "alice"
sha256 = "{HASH}"
tenant = "team-a"
requests_per_minute = 60
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    return path


def test_a_complete_file_is_read(tmp_path: Path) -> None:
    config = load(write(tmp_path, FILE))
    assert (config.listen.port, config.routing.policy, config.admission.queue_s) == (9000, "least_tokens", 12)
    assert config.routing.cost.kv_pressure_s == 0.3
    assert (config.store, config.meter.flush_rows) == ("usage.db", 7)
    assert config.admin_token_file == Path("admin.token")
    first, second = config.worker_specs()
    assert (first.worker_id, first.role, first.models, dict(first.labels)) == (
        "a:1",
        Role.PREFILL,
        ("m",),
        {"zone": "x"},
    )
    assert (second.url, second.dialect, second.events_url) == ("http://b:2", "vllm", "tcp://b:5557")
    assert config.key[0].tenant == "team-a"
    assert config.price[0].cached_input == 0.05


def test_flags_take_precedence_and_add_workers(tmp_path: Path) -> None:
    overrides = {"listen.port": 1234, "worker": [{"url": "http://c:3"}], "store": "other.db"}
    config = load(write(tmp_path, FILE), overrides)
    assert config.listen.port == 1234
    assert config.store == "other.db"
    assert [spec.worker_id for spec in config.worker_specs()] == ["a:1", "b:2", "c:3"]


def test_without_a_file_all_settings_have_their_defaults() -> None:
    assert load(None) == GatewayConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[listen]\nport = 'x'", "listen.port='x': give a whole number from 0 to 65535"),
        ("[listen]\nprot = 1", "listen.prot: no such setting; did you mean listen.port?"),
        ("[listen]\nport = 70000", "listen.port=70000"),
        ("nonsense = 1", "nonsense: no such setting; choose one of: admin_token_file"),
        ("[routing.cost]\nmove = 1", "routing.cost.move: no such setting"),
        ("[routing.cost]\nmove_part = 0.5", "routing.cost.move_part: this setting was removed; delete it"),
        ('[meter]\npath = "usage.db"', "meter.path was renamed: write store"),
        ('store = "mysql://me:pw@db/x"', "store=mysql://me:***@db/x: give the path of a SQLite file"),
        ("[admission]\nqueue_s = -1", "admission.queue_s=-1"),
        ("[listen]\ntls_cert = 'a.pem'", "TLS needs both"),
        (
            "[[worker]]\nurl = 'http://a'\nrole = 'boss'",
            "worker[0].role='boss': give unified, prefill or decode",
        ),
        (
            "[[worker]]\nurl = 'http://a'\nrle = 'prefill'",
            "worker[0].rle: no such setting; did you mean worker[0].role?",
        ),
        ("[[worker]]\nurl = 'http://a'\nweight = 'x'", "worker[0].weight='x': give a number above 0"),
        ("[[worker]]\nrole = 'prefill'", "worker[0].url is missing: give a URL such as http://host:port"),
        ("[[worker]]\nurl = 'http://a'\n[[worker]]\nurl = 'http://a/'", "worker.url: http://a is given twice"),
        ("[[worker]]\nurl = 'http://[::1'", "worker http://[::1: url: Invalid IPv6 URL"),
        ("[[worker]]\nurl = 'ftp://a'", "worker ftp://a: url must be a URL such as http://host:port"),
        ("[[worker]]\nurl = 'http://a:99999'", "worker http://a:99999: url"),
        ("[[worker]]\nurl = 'http://u:p@a'", "url may only have a host, a port and a path"),
        ("[[key]]\nname = 'a'\nsha256 = 'abc'", "key[0].sha256='abc': give 64 lower-case hex digits"),
        (f"[[key]]\nname = 'a b'\nsha256 = '{HASH}'", "key[0].name='a b': give up to 64 letters"),
        (f"[[key]]\nname = 'a'\nsha256 = '{HASH}'\ntenant = 'x:y'", "key[0].tenant='x:y': give up to 64 letters"),
        (
            f"[[key]]\nname = 'a'\nsha256 = '{HASH}'\nconcurrency = 0",
            "key[0].concurrency=0: give a whole number, at least 1",
        ),
        ("[[price]]\nmodel = 'm'\ninput = -1\noutput = 1", "price[0].input=-1: give a number from 0 to 1000000000"),
        ("log_level = 'loud'", "log_level='loud'"),
        ("[tracing]\nsample = 2", "tracing.sample=2"),
        ("[listen", "not TOML"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text)).worker_specs()
    assert words in caught.value.message


def test_two_urls_of_one_worker_are_refused() -> None:
    config = load(None, {"worker": [{"url": "http://a"}, {"url": "http://a:80"}]})
    with pytest.raises(ConfigError, match="a:80 is given twice"):
        config.worker_specs()


@pytest.mark.parametrize("limit", ["budget", "session_budget"])
def test_budgets_need_a_store(tmp_path: Path, limit: str) -> None:
    file = write(tmp_path, f"[[key]]\nname = 'alice'\nsha256 = '{HASH}'\n{limit} = 5")
    load(file)
    with pytest.raises(ConfigError, match="key 'alice': a budget is counted in the store"):
        load(file, {"store": "none"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("http://a:1", {"url": "http://a:1"}),
        ("http://a:1,role=decode,dialect=sglang", {"url": "http://a:1", "role": "decode", "dialect": "sglang"}),
        ("http://a:1, weight=0.5 ,cluster=eu", {"url": "http://a:1", "weight": 0.5, "cluster": "eu"}),
        ("http://a:1,model=x,model=y", {"url": "http://a:1", "models": ["x", "y"]}),
        ("http://a:1,label.zone=b", {"url": "http://a:1", "labels": {"zone": "b"}}),
        (
            "http://a:1,events=tcp://a:5557,bootstrap_port=8998",
            {"url": "http://a:1", "events": "tcp://a:5557", "bootstrap_port": 8998},
        ),
    ],
)
def test_a_worker_on_the_command_line(text: str, table: dict[str, Any]) -> None:
    assert parse_worker(text) == table
    assert load(None, {"worker": [table]}).worker_specs()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:1", "url must be a URL such as"),
        ("http://a,role", "'role' must have the form name=value"),
        ("http://a,colour=red", "no option 'colour'; choose one of: role, dialect"),
        ("http://a,weight=heavy", "weight='heavy': give a number above 0"),
        ("http://a,role=decode,role=prefill", "role is given twice"),
        ("http://a,weight=0", "weight='0': give a number above 0"),
        ("http://a,weight=nan", "weight='nan': give a number above 0"),
        ("http://a,events=5557", "events='5557': give an address that begins with tcp:// or ipc://"),
    ],
)
def test_a_wrong_worker_option_is_quoted(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_worker(text)
    assert words in caught.value.message


def test_worker_ids_are_host_port_and_path() -> None:
    assert worker_id_of("http://a") == "a:80"
    assert worker_id_of("https://a/") == "a:443"
    assert worker_id_of("http://[::1]:8000") == "[::1]:8000"
    assert worker_id_of("http://a:1/openai/") == "a:1/openai"


def test_secrets_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert read_secret(None, "admin_token_file") is None
    path.write_text("  s3cret\n")
    assert read_secret(path, "admin_token_file") == "s3cret"
    path.write_text("\n new \n\nold\n")
    assert read_secret(path, "admin_token_file") == "new"
    assert read_secrets(path, "admin_token_file") == ("new", "old")
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_secret(path, "admin_token_file")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "none", "admin_token_file")


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ({"max_bodies_mib": 50.0}, "max_bodies_mib=50 is smaller than twice"),
        ({"trusted_addresses": ["10.0.0.0/33"]}, "trusted_addresses: '10.0.0.0/33'"),
        ({"max_connections_per_address": 0}, "max_connections_per_address"),
        ({"max_public_body_kib": 0}, "max_public_body_kib"),
    ],
)
def test_limits_of_bodies_and_connections_are_checked(listen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, {f"listen.{name}": value for name, value in listen.items()})


def test_limits_follow_the_settings_that_they_depend_on() -> None:
    listen = load(None, {"listen.max_body_mib": 500.0, "listen.max_connections": 100}).listen
    assert (listen.held_body_mib, listen.connections_per_address) == (2000.0, 25)
    assert load(None).listen.held_body_mib == 1024.0
