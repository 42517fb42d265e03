"""The entry point of the engine process. It reads weights ahead from the drive while torch is imported."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stoker.base import log as logs
from stoker.base.allowance import available_ram
from stoker.base.timeline import Timeline, process_start_s
from stoker.checkpoint.weight_files import WeightReadAhead, weight_files
from stoker.engine.process.lazy_modules import lazily_imported
from stoker.proto.messages import EngineArguments, Prepared
from stoker.proto.pipe import EngineEnd, FrameEnd

# How long a thread may hold the GIL while other threads wait for it. A thread that releases the GIL, for the drive or the
# GPU, waits this long to get it back. With Python's default of 5 ms, the import of torch would halve the speed of reading
# ahead, and a step would take 65 ms instead of 10 ms while a grammar is being compiled.
_SWITCH_INTERVAL_S = 0.0005
# They are for tracing and exporting models, and take a quarter of torch's import.
_UNUSED_MODULES = ("torch._meta_registrations", "torch.export", "torch.distributions")


@dataclass(frozen=True, slots=True)
class StartArguments:
    """The server's arguments, the timeline of the start, and the read-ahead of the weights, which is already running."""

    arguments: EngineArguments
    timeline: Timeline
    ahead: WeightReadAhead


def main() -> None:
    """Run the engine process."""
    # Ctrl-C reaches the whole process group, and systemd and Slurm signal all processes of a service. The server decides when
    # the engine ends: it finishes the running requests first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    options = _parse_options()
    pipe = EngineEnd(socket.socket(fileno=options.pipe))
    ahead = _read_ahead(options.folder) if options.folder is not None else None
    try:
        received = _prepare_and_receive(pipe, ahead, options.prepare)
        from stoker.engine.process.main import serve  # imported above, with torch

        serve(pipe, received.arguments, received.ahead, received.timeline)
    except FrameEnd:  # the server has ended, or does not need this process
        return


def _prepare_and_receive(pipe: EngineEnd, ahead: WeightReadAhead | None, device: str | None) -> StartArguments:
    """Import torch and, for a spare, make a context on `device`, while a thread receives the arguments."""
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(_receive_arguments, pipe, ahead)
        try:
            importing_s = time.time()
            with lazily_imported(*_UNUSED_MODULES):
                from stoker.engine.process.main import prepare_device

            imported_s = time.time()
            if device is not None:
                prepare_device(device)
                pipe.send(Prepared())
        except BaseException:
            pipe.close()  # ends the thread, for which the executor waits
            raise
        received = receiving.result()
    if device is None:  # a spare has done this long before its start
        received.timeline.add("engine: process", process_start_s(), importing_s)
        received.timeline.add("engine: import", importing_s, imported_s)
    return received


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("pipe", type=int, help="the pipe's file descriptor")
    parser.add_argument("--folder", type=Path, help="the model folder, if it is known: its weights are read ahead")
    parser.add_argument("--prepare", metavar="DEVICE", help="make a context on this device before the arguments arrive")
    return parser.parse_args()


def _read_ahead(folder: Path) -> WeightReadAhead:
    return WeightReadAhead(weight_files(folder), available_ram() // 4)


def _receive_arguments(pipe: EngineEnd, ahead: WeightReadAhead | None) -> StartArguments:
    arguments = pipe.receive()
    assert isinstance(arguments, EngineArguments), f"expected EngineArguments first, got {type(arguments).__name__}"
    logs.set_up(arguments.log_level)
    if arguments.kernel_cache_dir is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", arguments.kernel_cache_dir)
    ahead = ahead or _read_ahead(Path(arguments.folder))
    return StartArguments(arguments, Timeline(arguments.timeline_origin_s), ahead)


if __name__ == "__main__":
    main()
