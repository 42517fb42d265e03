"""`stoker batch`: run a file of requests as a batch, show its progress, and download its results."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.address import host_of_url
from stoker.base.errors import ConfigError, StokerError
from stoker.base.output import print_message, print_result
from stoker.base.paths import expand_home
from stoker.cli.serving import progress_line

if TYPE_CHECKING:
    from stoker.cli.batch_client import BatchClient

NAME = "batch"
HELP = "run a file of requests on idle capacity"
DESCRIPTION = """Run the requests of a file as a batch: upload it, show the progress, and download the results. Each line of the
file is a request: {"custom_id", "method": "POST", "url", "body"}. Ctrl-C leaves the batch running; `stoker batch BATCH_ID` waits
for it again."""

EXIT_INCOMPLETE = 1  # some lines have no result, or an error
_BATCH_ID = re.compile(r"batch_[0-9A-Za-z_-]+")
_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_POLL_S = (0.25, 5.0)  # the least and the longest time between two looks
_SHOWN_ERRORS = 20
_STAGES = {
    "validating": "reading the file",
    "in_progress": "running",
    "finalizing": "writing the results",
    "cancelling": "stopping",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "target", metavar="FILE|BATCH_ID", help="The file of requests, or a batch that was begun before."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="Address of the gateway. Default: %(default)s.")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("STOKER_API_KEY"),
        help="API key. Default: the environment variable STOKER_API_KEY.",
    )
    parser.add_argument(
        "--output",
        type=expand_home,
        metavar="FILE",
        help="Where to write the results. Errors go to the same name with .errors. Default: FILE.results, or"
        " BATCH_ID.results.",
    )
    parser.add_argument(
        "--window", default="24h", help="How long the batch may take, from 1h to 168h. Default: %(default)s."
    )
    parser.add_argument("--no-wait", action="store_true", help="Print the id of the batch, and do not wait for it.")
    parser.add_argument(
        "--cancel", action="store_true", help="Stop the batch BATCH_ID. It keeps the results that it has."
    )


def run(args: argparse.Namespace) -> int:
    from stoker.cli.batch_client import BatchClient

    host_of_url("--url", args.url)
    client = BatchClient(args.url, (args.api_key or "").strip() or None)
    file = expand_home(args.target)
    is_begun = _BATCH_ID.fullmatch(args.target) is not None and not file.exists()
    output = args.output or Path(f"{args.target}.results")
    if args.cancel and not is_begun:
        raise ConfigError(f"--cancel needs the id of a batch, such as batch_0a1b, and not {args.target!r}")
    for path in (output, _errors_path(output)):
        if path.exists() and not args.cancel and not args.no_wait:
            raise ConfigError(f"{path} exists; move it, or choose another --output")
    batch_id = args.target if is_begun else _begin(client, file, args.window)
    if args.cancel:
        client.cancel(batch_id)
    if args.no_wait:
        print_result(batch_id)
        return 0
    try:
        batch = _wait(client, batch_id)
    except KeyboardInterrupt:
        again = shlex.join(["stoker", "batch", batch_id, "--url", args.url, "--output", str(output)])
        print_message(
            f"\nThe batch {batch_id} goes on. Wait for it again, or stop it with --cancel:\n  {again}", sys.stderr
        )
        raise
    return _report(client, batch, output)


def _begin(client: BatchClient, file: Path, window: str) -> str:
    """Upload a file and create a batch of it. A file whose batch is refused does not stay."""
    endpoint = _endpoint(file)
    progress_line()("uploading", 0, 0)
    file_id = client.upload(file)
    try:
        return str(client.create(file_id, endpoint, window)["id"])
    except BaseException:
        with suppress(StokerError):
            client.delete_file(file_id)
        raise


def _endpoint(file: Path) -> str:
    """Return the endpoint of a batch: the URL of its first line. The gateway checks all lines."""
    number = 1
    try:
        with file.open("rb") as lines:
            for line in lines:
                if line.strip():
                    url = json.loads(line)["url"]
                    if isinstance(url, str):
                        return url
                    raise TypeError
                number += 1
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; give a file of requests or a batch id") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}, line {number}: not a request with a 'url'") from error
    raise ConfigError(f"{file} has no requests")


def _wait(client: BatchClient, batch_id: str) -> Any:
    """Return the batch when it has ended. If the gateway does not answer, retry: the batch outlives it."""
    from stoker.cli.batch_client import GatewayBusy

    show, (wait_s, most_s), is_away = progress_line(), _POLL_S, False
    while True:
        try:
            batch = client.get(batch_id)
        except GatewayBusy as error:
            if not is_away:
                print_message(f"stoker: {error.message}; trying again (Ctrl-C stops)", sys.stderr)
            is_away = True
        else:
            is_away = False
            counts, status = batch["request_counts"], batch["status"]
            if status in _ENDED:
                show(f"{batch_id}: {status}", 1, 1)
                return batch
            done = counts["completed"] + counts["failed"]
            show(f"{batch_id}: {_STAGES.get(status, status)}", min(done, max(counts["total"] - 1, 0)), counts["total"])
        time.sleep(wait_s)
        wait_s = min(1.5 * wait_s, most_s)


def _report(client: BatchClient, batch: Any, output: Path) -> int:
    """Download the results of a batch that has ended, and say how it ended. Return the exit code."""
    counts, usage = batch["request_counts"], batch.get("usage") or {}
    for file_id, path in ((batch["output_file_id"], output), (batch["error_file_id"], _errors_path(output))):
        if file_id is not None:
            client.download(file_id, path)
            print_result(str(path))
    errors = (batch.get("errors") or {}).get("data") or []
    for error in errors[:_SHOWN_ERRORS]:
        place = f"line {error['line']}: " if error.get("line") else ""
        print_message(f"stoker: {place}{error['message']}", sys.stderr)
    if len(errors) > _SHOWN_ERRORS:
        print_message(f"stoker: {len(errors) - _SHOWN_ERRORS} more errors", sys.stderr)
    print_message(
        f"{batch['status']}: {counts['completed']} of {counts['total']} requests answered, {counts['failed']} failed,"
        f" {usage.get('input_tokens', 0)} input and {usage.get('output_tokens', 0)} output tokens",
        sys.stderr,
    )
    is_whole = batch["status"] == "completed" and not counts["failed"]
    return 0 if is_whole else EXIT_INCOMPLETE


def _errors_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.errors")
