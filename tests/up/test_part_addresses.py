"""The addresses of parts on other machines: what a part is started with, and what follows when another part moves."""

from __future__ import annotations

from stoker.up.part import ENDPOINT, GATEWAY_LIST, MOONCAKE, FleetPart, NodeRequest, PartKind
from stoker.up.part_addresses import FileChange, Move, PartAddresses


def part(name: str, kind: PartKind, *command: str) -> FleetPart:
    lists = {GATEWAY_LIST: ("gateway-0", "gateway-1")} if kind is PartKind.WORKER else {}
    request = NodeRequest(address=f"http://{ENDPOINT}", health_url=f"http://{ENDPOINT}/health", lists=lists)
    addresses = {MOONCAKE: "mooncake"} if MOONCAKE in command else {}
    return FleetPart(name, kind, kind.value, command, "", None, 10.0, addresses=addresses, request=request)


def fleet() -> PartAddresses:
    worker = part("worker", PartKind.WORKER, "serve", "--kv-mooncake", MOONCAKE)
    gateways = [part(f"gateway-{number}", PartKind.GATEWAY, "gateway") for number in (0, 1)]
    return PartAddresses([part("mooncake", PartKind.STORE, "master"), *gateways, worker])


def lists(of: FleetPart) -> str:
    assert of.request is not None
    return of.request.texts[GATEWAY_LIST]


def test_a_part_is_started_with_the_addresses_that_are_known() -> None:
    addresses = fleet()
    assert addresses.of("mooncake") == ""
    addresses.learn("mooncake", "10.0.0.4:5000")
    addresses.learn("gateway-1", "http://10.0.0.3:8000")
    resolved = addresses.resolved("worker")
    assert resolved.command == ("serve", "--kv-mooncake", "10.0.0.4:5000")
    assert lists(resolved) == "http://10.0.0.3:8000\n"
    addresses.learn("gateway-0", "http://10.0.0.2:8000")
    assert lists(addresses.resolved("worker")) == "http://10.0.0.2:8000\nhttp://10.0.0.3:8000\n"


def test_a_part_that_stays_changes_nothing() -> None:
    addresses = fleet()
    addresses.learn("mooncake", "10.0.0.4:5000")
    addresses.resolved("worker")
    assert addresses.learn("mooncake", "10.0.0.4:5000") == Move()


def test_workers_are_told_of_a_gateway_that_moves_and_restarted_for_a_master_that_moves() -> None:
    addresses = fleet()
    addresses.learn("mooncake", "10.0.0.4:5000")
    addresses.learn("gateway-0", "http://10.0.0.2:8000")
    addresses.resolved("worker")
    told = addresses.learn("gateway-0", "http://10.0.0.9:8000")
    assert told == Move([FileChange("worker", GATEWAY_LIST, "http://10.0.0.9:8000\n")], [])
    assert addresses.learn("mooncake", "10.0.0.5:5000") == Move([], ["worker"])
    addresses.resolved("worker")
    assert addresses.learn("mooncake", "10.0.0.5:5000") == Move()
