"""`stoker models`: list, download and remove the models on this machine."""

from __future__ import annotations

import argparse
import os

from stoker.base.output import print_result

NAME = "models"
HELP = "list, download and remove models on this machine"
DESCRIPTION = """List, download and remove the models on this machine: the default model and converted GGUF files in the cache
folder (STOKER_CACHE), and repositories in the cache of the Hugging Face Hub client (HF_HOME), which other programs share."""
LIST_HELP = "List the models that can be served without a download."
PULL_HELP = "Download a model, so that `stoker serve` and `stoker up` need not."
REMOVE_HELP = "Delete a model's files. A worker that has loaded it keeps running."

_GB = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    actions.add_parser("list", help=LIST_HELP, description=LIST_HELP)
    pull = actions.add_parser("pull", help=PULL_HELP, description=PULL_HELP)
    pull.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="A Hugging Face id (org/name or org/name@revision), or a .gguf file to convert. Default: the default model.",
    )
    remove = actions.add_parser("remove", help=REMOVE_HELP, description=REMOVE_HELP)
    remove.add_argument("name", metavar="NAME", help="The name of the model, as `stoker models list` shows it.")


def run(args: argparse.Namespace) -> int:
    from stoker.checkpoint.local_models import remove_model
    from stoker.checkpoint.source import default_cache_dir, resolve_model
    from stoker.cli.serving import progress_line

    cache_dir = default_cache_dir(os.environ)
    if args.action == "list":
        print_result(_listed())
    elif args.action == "pull":
        folder = resolve_model(args.model, cache_dir, progress_line())
        print_result(f"{folder.name} is in {folder.path}.")
    else:
        removed = remove_model(args.name, cache_dir, progress_line())
        print_result(f"Removed {removed.name}: {removed.num_bytes / _GB:.2f} GB.")
    return 0


def _listed() -> str:
    from stoker.checkpoint.local_models import local_models
    from stoker.checkpoint.source import default_cache_dir
    from stoker.up.terminal import table

    models = local_models(default_cache_dir(os.environ))
    if not models:
        return "There are no models on this machine. `stoker models pull` downloads one."
    rows = [
        (one.name, f"{one.num_bytes / _GB:.2f}", "ready" if one.complete else "incomplete", one.origin, str(one.path))
        for one in models
    ]
    return table(("NAME", "GB", "STATE", "FROM", "FOLDER"), rows)
