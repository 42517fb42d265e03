"""Requests to a gateway's admin API, for the commands that use it."""

from __future__ import annotations

import argparse
import os
import urllib.error
import urllib.request
from dataclasses import dataclass

from stoker.base.address import host_of_url
from stoker.base.errors import ConfigError
from stoker.base.paths import expand_home

_ANSWER_S = 10.0


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        metavar="GATEWAY",
        help="The gateway, for example http://10.0.0.7:8000. Default: the one that `stoker up` runs on this machine.",
    )
    parser.add_argument(
        "--admin-token-file",
        type=expand_home,
        metavar="FILE",
        help="File with the gateway's admin token. Needed if `stoker up` did not start the gateway on this machine.",
    )


@dataclass(frozen=True, slots=True)
class GatewayAdmin:
    """The admin API of one gateway."""

    url: str
    token: str

    @classmethod
    def of(cls, args: argparse.Namespace) -> GatewayAdmin:
        """Return the gateway that the arguments name, or the one that `stoker up` runs here."""
        from stoker.gateway.config import read_secret
        from stoker.up.state import default_state_dir, living_fleets

        token = read_secret(args.admin_token_file, "--admin-token-file")
        fleets = list(living_fleets(default_state_dir(os.environ) / "fleets"))
        if args.url is not None:
            host_of_url("--url", args.url)
            url = args.url.rstrip("/")
            fleets = [fleet for fleet in fleets if fleet.gateway_url == url]
        elif not fleets:
            raise ConfigError("no fleet runs on this machine: name a gateway with --url and --admin-token-file")
        elif len(fleets) > 1:
            urls = ", ".join(sorted(fleet.gateway_url for fleet in fleets))
            raise ConfigError(f"{len(fleets)} fleets run on this machine: choose one with --url ({urls})")
        else:
            url = fleets[0].gateway_url
        if token is None and fleets:
            token = read_secret(expand_home(fleets[0].admin_token_file), "--admin-token-file")
        if token is None:
            raise ConfigError(f"--admin-token-file is missing: only the admin token opens {url}/admin")
        return cls(url, token)

    def get(self, path: str) -> bytes:
        return self._send("GET", path)

    def post(self, path: str) -> bytes:
        return self._send("POST", path)

    def _send(self, method: str, path: str) -> bytes:
        from stoker.proto.openai.errors import error_message

        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.url + path, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as refused:
            with refused:
                hint = "; check --admin-token-file" if refused.code == 401 else ""
                message = error_message(refused.read())
            raise ConfigError(f"{self.url}{path} answered {refused.code}{hint}: {message}") from refused
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.url} does not answer: {error}; give the URL of a running gateway") from error
