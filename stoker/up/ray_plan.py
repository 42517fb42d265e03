"""The parts of a fleet that run on the nodes of a Ray cluster. Their addresses are not known before they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.base.paths import expand_home
from stoker.base.settings import merged
from stoker.up import toml
from stoker.up.config import UpConfig, WorkersConfig
from stoker.up.gateway_files import Keys, with_sent_files
from stoker.up.part import (
    ENDPOINT,
    GATEWAY_FILE,
    GATEWAY_LIST,
    HOST,
    MOONCAKE,
    NODE_RANK,
    PORT,
    PYTHON,
    SECOND_ENDPOINT,
    SECOND_PORT,
    SECRET_FILE,
    FleetPart,
    NodeRequest,
    PartKind,
)

MASTER = "mooncake"  # name of the part
_STOKER = (PYTHON, "-m", "stoker.cli.main")


@dataclass(frozen=True, slots=True)
class RayParts:
    """Makes the parts that Ray places."""

    up: UpConfig
    secret_file: Path

    def master(self, command: Sequence[str], stop_s: float) -> FleetPart:
        """Return the Mooncake master."""
        listen = ("--rpc_address", HOST, "--rpc_port", PORT, "--metrics_host", HOST, "--metrics_port", SECOND_PORT)
        request = NodeRequest(
            address=ENDPOINT,
            health_url=f"http://{SECOND_ENDPOINT}/health",
            resource=self.up.mooncake_resource,
            resource_setting="up.mooncake_resource",
            stays=True,
        )
        return FleetPart(MASTER, PartKind.STORE, "store", (*command, *listen), "", None, stop_s=stop_s, request=request)

    def gateways(self, table: Mapping[str, Any], port: int, file_keys: Keys, stop_s: float) -> list[FleetPart]:
        """Return the gateways. `table` has their settings; the files that it names are sent to the nodes.

        Only the first one runs the autoscaler, because two of them would start workers for the same load.
        """
        table, files = with_sent_files(table, file_keys)
        listen = table.get("listen", {})
        where = ("--host", listen.get("host", HOST), "--port", PORT)
        return [
            FleetPart(
                name=name,
                kind=PartKind.GATEWAY,
                role="gateway",
                command=(*_STOKER, "gateway", "--config", GATEWAY_FILE, *where),
                address="",
                ready_path="/health",
                stop_s=stop_s,
                request=NodeRequest(
                    address=f"http://{ENDPOINT}",
                    health_url=f"http://{ENDPOINT}/health",
                    ports=(port, 0),
                    cpus=listen.get("processes", 1),
                    resource=self.up.gateway_resource,
                    resource_setting="up.gateway_resource",
                    stays=True,
                    files=files,
                    texts={
                        GATEWAY_FILE: toml.dumps(merged(table, {"autoscale": {"mode": "off"}}) if number else table)
                    },
                ),
            )
            for number, name in enumerate(gateway_names(self.up.gateways))
        ]

    def worker(
        self,
        workers: WorkersConfig,
        name: str,
        flags: Sequence[str],
        gateways: Sequence[str],
        *,
        stop_s: float,
        spare: bool,
    ) -> FleetPart:
        """Return a worker. Its model is found where it runs, not here."""
        options = workers.options
        nodes = options.get("nodes", 1)
        where = ["--host", HOST, "--port", PORT, "--secret-file", SECRET_FILE, "--gateway-file", GATEWAY_LIST]
        if nodes > 1:
            where += ["--head", SECOND_ENDPOINT, "--node-rank", NODE_RANK]
        return FleetPart(
            name=name,
            kind=PartKind.WORKER,
            role=workers.role,
            command=(*_STOKER, "serve", *_named(workers.model), *flags, *where),
            address="",
            ready_path="/ready",
            stop_s=stop_s,
            env=workers.env,
            spare=spare,
            addresses={MOONCAKE: MASTER} if MOONCAKE in flags else {},
            request=NodeRequest(
                address=f"http://{ENDPOINT}",
                health_url=f"http://{ENDPOINT}/health",
                nodes=nodes,
                gpus_per_node=options.get("tp", 1) * options.get("pp", 1) // nodes // options.get("ranks_per_gpu", 1),
                device=options.get("device"),
                files={SECRET_FILE: self.secret_file},
                lists={GATEWAY_LIST: tuple(gateways)},
            ),
        )


def gateway_names(count: int) -> list[str]:
    return ["gateway"] if count == 1 else [f"gateway-{number}" for number in range(count)]


def _named(model: str | None) -> list[str]:
    """Return the model as an argument. A folder of this machine must be at the same path on the others."""
    if model is None:
        return []
    folder = expand_home(model)
    return [str(folder.absolute()) if folder.exists() else model]
