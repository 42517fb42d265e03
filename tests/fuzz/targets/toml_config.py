"""fleet.toml and the gateway's TOML file with its keys, tenants, prices and workers."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from stoker.base.errors import ConfigError
from stoker.base.settings import read_toml
from stoker.cli.serve_settings import serve_keys
from stoker.gateway.admission.api_keys import ApiKeys
from stoker.gateway.config import load
from stoker.up.fleet_table import fleet_config
from stoker.up.toml import dumps
from tests.fuzz.target import FuzzTarget

_FILE = Path(tempfile.mkdtemp(prefix="fuzz-toml-")) / "config.toml"
_SERVE = serve_keys()


def execute(data: bytes, rng: random.Random) -> None:
    _FILE.write_bytes(data)
    try:
        config = load(_FILE)
        config.worker_specs()
        ApiKeys(config.key, config.tenant)
    except ConfigError:
        pass
    fleet = fleet_config(read_toml(_FILE), _SERVE)
    assert sum(one.count for one in fleet.workers) > 0 or fleet.gateway
    dumps(fleet.gateway)


def seeds() -> list[bytes]:
    gateway = b"""
[listen]
port = 8000
[[worker]]
url = "http://127.0.0.1:9000"
[[tenant]]
name = "t"
weight = 2.0
[[key]]
name = "k"
tenant = "t"
sha256 = "%b"
requests_per_minute = 5
[[price]]
model = "m"
""" % (b"ab" * 32)
    fleet = b"""
[gateway]
listen.port = 1
[store]
host_gib = 1.5
[up]
drain_s = 3
[[workers]]
count = 2
model = "m"
role = "unified"
devices = [0, 1]
env = {A = "b"}
"""
    return [gateway, fleet, fleet.replace(b"unified", b"prefill") + b'[[workers]]\nrole="decode"\n']


TARGET = FuzzTarget(
    execute,
    seeds,
    errors=(ConfigError,),
    tokens=[
        b"[[workers]]\n", b"[gateway]\n", b"[[key]]\n", b'name = "x"\n', b"count = 1000000000000\n", b"1979-05-27T07:32:00Z",
        b"inf", b"nan", b"0x7f", b'"\\u0000"', b"[[worker]]\n", b'config = "x"\n', b"{a=1}", b"'''", b"a.b.c = 1\n", b"-0.0",
    ],
    is_network=False,
    base_bytes=8 << 20,
)  # fmt: skip
