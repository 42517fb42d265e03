"""`stoker model`: give a running worker another model."""

from __future__ import annotations

import argparse
import urllib.error
import urllib.request

from stoker.base.address import host_of_url
from stoker.base.errors import ConfigError
from stoker.base.fleet_key import FleetKey, read_fleet_secret
from stoker.base.output import print_result
from stoker.base.paths import expand_home
from stoker.proto.internal_http import MODEL_PATH
from stoker.proto.model_switch import decode_switched, encode_model_request, refusal_message
from stoker.proto.signed_http import AUTH_HEADER, CHALLENGE_HEADER, PROOF_HEADER, RequestSigner

NAME = "model"
HELP = "give a running worker another model"
DESCRIPTION = """Give a running worker another model. The worker finishes its running requests, then its spare engine process loads
the new model. Meanwhile it answers 503, and gateways use other workers. If the new model cannot be loaded, the worker says why
and serves the old one again. The worker resolves MODEL on its own machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("url", metavar="WORKER", help="The worker's URL, for example http://10.0.0.7:8001.")
    parser.add_argument(
        "model", metavar="MODEL", help="A model folder or .gguf file on the worker's machine, or a Hugging Face id."
    )
    parser.add_argument(
        "--secret-file", type=expand_home, metavar="FILE", help="File with the fleet's secret. It is required."
    )
    parser.add_argument(
        "--served-name",
        action="append",
        default=[],
        metavar="NAME",
        help="Name of the model in the API; repeat it for more names. Default: the name of the model folder.",
    )


def run(args: argparse.Namespace) -> int:
    host_of_url("WORKER", args.url)
    secret = read_fleet_secret(args.secret_file, "--secret-file")
    if secret is None:
        raise ConfigError("--secret-file is missing: only the fleet's secret may change a worker's model")
    body = encode_model_request(args.model, args.served_name)
    switched = decode_switched(_post(args.url.rstrip("/"), MODEL_PATH, body, RequestSigner(FleetKey(secret))))
    print_result(f"{args.url} serves {', '.join(switched.models)} after {switched.seconds:.1f} s.")
    return 0


def _post(url: str, path: str, body: bytes, signer: RequestSigner) -> bytes:
    """Send a signed request and return its answer. The first one is refused, and its answer has the worker's challenge."""
    for is_last in (False, True):
        headers = {
            "Content-Type": "application/json",
            AUTH_HEADER: signer.sign(b"POST", path.encode(), body).decode(),
        }
        try:
            with urllib.request.urlopen(urllib.request.Request(url + path, body, headers)) as answer:
                if not signer.is_proven(answer.headers.get(PROOF_HEADER, "").encode()):
                    raise ConfigError(
                        f"{url} does not prove that it has the secret of --secret-file; is it the right worker?"
                    )
                return bytes(answer.read())
        except urllib.error.HTTPError as refused:
            with refused:
                if (
                    refused.code == 401
                    and not is_last
                    and signer.learn(refused.headers.get(CHALLENGE_HEADER, "").encode())
                ):
                    continue
                raise ConfigError(f"{url} answered {refused.code}: {refusal_message(refused.read())}") from refused
        except OSError as error:
            raise ConfigError(f"{url} cannot be reached: {error}; give the URL of a running worker") from error
    raise AssertionError("the second answer is returned or raised")
