"""`stoker trace`: reads what a gateway recorded with --record: shows it, replays its decisions, exports its requests."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.base.errors import ConfigError
from stoker.base.output import print_result

if TYPE_CHECKING:
    from stoker.replay.replayer import RecordedRequest, Replayer

NAME = "trace"
HELP = "replay the routing decisions that a gateway recorded, or export its requests"
DESCRIPTION = """Read a file that `stoker gateway --record FILE` wrote. It has lengths, times, hashes of prompt blocks and sessions,
KV events, load reports and health changes, but no text."""
_EXIT_DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    replay = actions.add_parser(
        "replay",
        help="make all decisions again",
        description="Make every recorded decision again with the same classes. Without --policy, the exit code is 1 if any is"
        " different. With --policy, show what another policy would have chosen at the same moments.",
    )
    replay.add_argument("file", type=Path, metavar="FILE", help="The recording.")
    replay.add_argument("--policy", metavar="NAME", help="Another routing policy. Default: the recorded one.")
    replay.set_defaults(action=_replay)
    export = actions.add_parser(
        "export",
        help="write the requests as a trace",
        description="Write the answered requests as a trace in Mooncake's format, one JSON line for each. `stoker sim --trace`"
        " and `stoker bench serve --dataset trace --trace` read it.",
    )
    export.add_argument("file", type=Path, metavar="FILE", help="The recording.")
    export.add_argument("--output", type=Path, metavar="FILE", help="Default: print it.")
    export.set_defaults(action=_export)


def run(args: argparse.Namespace) -> int:
    return int(args.action(args))


def _replayed(path: Path, policy: str | None = None) -> tuple[Replayer, list[RecordedRequest]]:
    from stoker.replay.recording_file import read_recording
    from stoker.replay.replayer import Replayer
    from stoker.routing.policy import POLICIES

    if policy is not None and policy not in POLICIES:
        raise ConfigError(f"--policy {policy}: there is no such policy; choose one of {', '.join(sorted(POLICIES))}")
    header, events = read_recording(path)
    replayer = Replayer(header, policy)
    return replayer, replayer.run(events)


def _replay(args: argparse.Namespace) -> int:
    replayer, _ = _replayed(args.file, args.policy)
    found = replayer.summary
    if not found.num_decisions:
        raise ConfigError(f"{args.file} has no routing decisions")
    same = found.num_decisions - found.num_different
    lines = [
        f"decisions       {found.num_decisions}, of which {same} ({100 * same / found.num_decisions:.2f}%) as recorded",
        f"prompt tokens   {found.prompt_tokens}, of which {found.cached_tokens} expected in cache"
        f" ({100 * found.cached_tokens / max(1, found.prompt_tokens):.1f}%)",
        f"busiest worker  {found.skew:.2f} times the mean number of requests",
    ]
    if found.first_different:
        lines.append(f"first different {found.first_different}")
    print_result("\n".join(lines))
    return _EXIT_DIFFERENT if found.num_different and args.policy is None else 0


def _export(args: argparse.Namespace) -> int:
    from stoker.replay.mooncake_export import mooncake_lines

    lines = list(mooncake_lines(_replayed(args.file)[1]))
    if not lines:
        raise ConfigError(f"{args.file} has no answered requests")
    text = "\n".join(lines)
    if args.output is None:
        print_result(text)
    else:
        try:
            args.output.write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"--output {args.output}: {error.strerror}") from None
    return 0
