"""`stoker model`: give a running worker another model."""

from __future__ import annotations

import argparse
import http.client
import urllib.error
import urllib.request

from stoker.base.address import host_of_url
from stoker.base.errors import ConfigError
from stoker.base.fleet_key import FleetKey, read_fleet_secret
from stoker.base.output import print_result
from stoker.base.paths import expand_home
from stoker.proto.internal_http import MODEL_PATH
from stoker.proto.model_switch import MAX_DRAIN_S, decode_switched, encode_model_request
from stoker.proto.openai.errors import error_message
from stoker.proto.signed_http import AUTH_HEADER, CHALLENGE_HEADER, PROOF_HEADER, RequestSigner

NAME = "model"
HELP = "give a running worker another model"
DESCRIPTION = """Give a running worker another model. The worker finishes its running requests, then its spare engine process loads
the new model. Meanwhile it answers 503, and gateways use other workers. If the new model cannot be loaded, the worker says why
and serves the old one again. The worker resolves MODEL on its own machine. Ctrl-C cancels the switch until the old engine ends."""

_FIRST_ANSWER_S = 10.0


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
    parser.add_argument(
        "--drain-s",
        type=_drain_seconds,
        metavar="SECONDS",
        help="Longest wait for running requests, which then end with an error; gateways continue them on other workers. "
        "Default: --drain-s of the worker, which is 3600 if it was not set.",
    )


def _drain_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_DRAIN_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {MAX_DRAIN_S:g}")
    return seconds


def run(args: argparse.Namespace) -> int:
    host_of_url("WORKER", args.url)
    secret = read_fleet_secret(args.secret_file, "--secret-file")
    if secret is None:
        raise ConfigError("--secret-file is missing: only the fleet's secret may change a worker's model")
    body = encode_model_request(args.model, args.served_name, args.drain_s)
    switched = decode_switched(_post(args.url.rstrip("/"), MODEL_PATH, body, RequestSigner(FleetKey(secret))))
    print_result(f"{args.url} serves {', '.join(switched.models)} after {switched.seconds:.1f} s.")
    return 0


def _post(url: str, path: str, body: bytes, signer: RequestSigner) -> bytes:
    """Send a signed request and return its answer. The first one is refused, and its answer has the worker's challenge."""
    # The first answer comes at once. The second one comes after the drain and the load, which may take an hour.
    for is_last, timeout_s in ((False, _FIRST_ANSWER_S), (True, None)):
        headers = {
            "Content-Type": "application/json",
            AUTH_HEADER: signer.sign(b"POST", path.encode(), body).decode(),
        }
        try:
            with urllib.request.urlopen(urllib.request.Request(url + path, body, headers), timeout=timeout_s) as answer:
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
                raise ConfigError(f"{url} answered {refused.code}: {error_message(refused.read())}") from refused
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"{url} does not answer: {error}; give the URL of a running worker") from error
    raise AssertionError("the second answer is returned or raised")
