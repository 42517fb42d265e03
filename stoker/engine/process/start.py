"""Where an engine's process begins: weights are read ahead from the drive while torch is imported."""

from __future__ import annotations

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
from stoker.proto.messages import EngineArguments
from stoker.proto.pipe import EngineEnd, FrameEnd

# How long a thread may keep the interpreter while others want it. Every call that gives it up, to the drive or the card, waits its
# turn to go on: at the usual 5 ms an import halves the speed of reading ahead, and a step of a dozen such calls beside a grammar
# that is being made takes 65 ms instead of 10.
_TURN_S = 0.0005


@dataclass(frozen=True, slots=True)
class Told:
    arguments: EngineArguments
    timeline: Timeline
    ahead: WeightReadAhead


def main() -> None:
    # Ctrl-C reaches the whole process group; the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(_TURN_S)
    pipe = EngineEnd(socket.socket(fileno=int(sys.argv[1])))
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    ahead = _read_ahead(folder) if folder is not None else None
    with ThreadPoolExecutor(1) as threads:
        listening = threads.submit(_listen, pipe, ahead)
        importing_s = time.time()
        from stoker.engine.process.main import serve

        imported_s = time.time()
        try:
            told = listening.result()
        except FrameEnd:
            return
    told.timeline.add("engine: import", importing_s, imported_s)
    try:
        serve(pipe, told.arguments, told.ahead, told.timeline)
    except FrameEnd:
        return


def _read_ahead(folder: Path) -> WeightReadAhead:
    return WeightReadAhead(weight_files(folder), available_ram() // 4)


def _listen(pipe: EngineEnd, ahead: WeightReadAhead | None) -> Told:
    arguments = pipe.receive()
    assert isinstance(arguments, EngineArguments), f"first came {type(arguments).__name__}"
    logs.set_up(arguments.log_level)
    if arguments.kernel_cache_dir is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", arguments.kernel_cache_dir)
    timeline = Timeline(arguments.timeline_origin_s)
    timeline.add("engine: process", process_start_s(), time.time())
    ahead = ahead or _read_ahead(Path(arguments.folder))
    return Told(arguments, timeline, ahead)


if __name__ == "__main__":
    main()
