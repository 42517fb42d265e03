"""Requests to a gateway's admin API, for the commands that use it."""

from __future__ import annotations

import argparse
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

from stoker.base.address import host_of_url
from stoker.base.errors import ConfigError
from stoker.base.paths import expand_home

_ANSWER_S = 10.0
_AGAIN_S = 0.5


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


class GatewayRefused(ConfigError):
    """The gateway answered with an error."""

    def __init__(self, message: str, status: int, gateway_code: str) -> None:
        super().__init__(message)
        self.status = status
        self.gateway_code = gateway_code  # the code in the answer; empty if it has none


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
            fleets = [fleet for fleet in fleets if fleet.has_gateway(url)]
        elif not fleets:
            raise ConfigError("no fleet runs on this machine: name a gateway with --url and --admin-token-file")
        elif len(fleets) > 1:
            urls = ", ".join(sorted(fleet.gateway_url for fleet in fleets))
            raise ConfigError(f"{len(fleets)} fleets run on this machine: choose one with --url ({urls})")
        else:
            url = fleets[0].gateway_url
            if not url:
                raise ConfigError(
                    "the gateway of the fleet has no address yet: `stoker status` shows what it waits for"
                )
        if token is None and fleets:
            token = read_secret(expand_home(fleets[0].admin_token_file), "--admin-token-file")
        if token is None:
            raise ConfigError(f"--admin-token-file is missing: only the admin token opens {url}/admin")
        return cls(url, token)

    def patient(self, seconds: float) -> PatientAdmin:
        """Return the same API for a command that goes on while the gateway is restarted."""
        return PatientAdmin(self.url, self.token, seconds)

    def get(self, path: str) -> bytes:
        return self._send("GET", path)

    def post(self, path: str) -> bytes:
        return self._send("POST", path)

    def _send(self, method: str, path: str) -> bytes:
        from stoker.proto.openai.errors import error_code, error_message

        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.url + path, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as refused:
            with refused:
                hint = "; check --admin-token-file" if refused.code == 401 else ""
                answer = refused.read()
            text = f"{self.url}{path} answered {refused.code}{hint}: {error_message(answer)}"
            raise GatewayRefused(text, refused.code, error_code(answer)) from refused
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.url} does not answer: {error}; give the URL of a running gateway") from error


@dataclass(frozen=True, slots=True)
class PatientAdmin(GatewayAdmin):
    """Repeats a request that gets no answer, for some time. Only for requests that may be carried out twice."""

    patience_s: float

    def _send(self, method: str, path: str) -> bytes:
        until_s = time.monotonic() + self.patience_s
        while True:
            try:
                return GatewayAdmin._send(self, method, path)
            except GatewayRefused:
                raise
            except ConfigError:
                if time.monotonic() >= until_s:
                    raise
            time.sleep(_AGAIN_S)
