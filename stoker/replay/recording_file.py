"""The file of a recording: a header, then frames of compressed events.

Each frame is a length (4 bytes, big-endian) and zlib-compressed events. Each event is a length and msgpack. It is a list whose
first item names it (`recorder.py` writes them, `replayer.py` reads them). A file that was cut off ends with its last whole frame.
"""

from __future__ import annotations

import queue
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import ConfigError
from stoker.base.log import EventLog

MAGIC = b"stoker-recording\n"
VERSION = 1
_LENGTH = struct.Struct(">I")
_MAX_FRAME_BYTES = 64 << 20
_FRAME_BYTES = 256 << 10  # of events, before compression
_FLUSH_S = 1.0
_MAX_WAITING = 256  # frames that wait for the disk

log = EventLog("recording")


class RecordingWriter:
    """Writes events in a thread. It stops for good if the file is full or the disk is too slow: a gap cannot be replayed."""

    def __init__(self, path: Path, max_bytes: int, header: dict[str, Any]) -> None:
        try:
            self._file = path.open("xb")
        except FileExistsError:
            raise ConfigError(f"{path} exists; a recording begins with the gateway, so give it a new file") from None
        except OSError as error:
            raise ConfigError(f"cannot write the recording {path}: {error.strerror}") from None
        self._path = path
        self._left = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._frames: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING)
        self._lock = threading.Lock()
        self.stopped = ""  # why nothing more is recorded
        self.num_events = 0
        self._file.write(MAGIC)
        self._add(self._encoder.encode({"version": VERSION, **header}))
        self._flush()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def write(self, event: list[Any]) -> None:
        if self.stopped:
            return
        try:
            data = self._encoder.encode(event)
        except (TypeError, OverflowError, ValueError) as error:
            self._stop(f"an event cannot be written: {error}")
            return
        self.num_events += 1
        with self._lock:
            self._add(data)
            if len(self._buffer) >= _FRAME_BYTES:
                self._flush()

    def close(self, timeout_s: float = 5.0) -> None:
        with self._lock:
            self._flush()
        self._frames.put(None)
        self._thread.join(timeout_s)

    def _add(self, data: bytes) -> None:
        self._buffer += _LENGTH.pack(len(data)) + data

    def _flush(self) -> None:
        if not self._buffer:
            return
        try:
            self._frames.put_nowait(bytes(self._buffer))
        except queue.Full:
            self._stop("the disk is too slow")
        self._buffer.clear()

    def _stop(self, why: str) -> None:
        if not self.stopped:
            self.stopped = why
            log.warning("recording_stopped", path=str(self._path), reason=why, events=self.num_events)

    def _run(self) -> None:
        with self._file:
            while True:
                try:
                    frame = self._frames.get(timeout=_FLUSH_S)
                except queue.Empty:
                    with self._lock:
                        self._flush()
                    continue
                if frame is None:
                    return
                self._write(frame)

    def _write(self, frame: bytes) -> None:
        if self._left <= 0:
            return
        packed = zlib.compress(frame, 1)
        self._left -= len(packed)
        if self._left <= 0:
            self._stop("the file has reached its maximum size")
            return
        try:
            self._file.write(_LENGTH.pack(len(packed)) + packed)
            self._file.flush()
        except OSError as error:
            self._left = 0
            self._stop(f"the disk refuses it: {error.strerror}")


def read_recording(path: Path) -> tuple[dict[str, Any], Iterator[list[Any]]]:
    """Return the header and the events of a recording. Raises ConfigError if the file is none, or of another version."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read the recording {path}: {error.strerror}") from None
    if file.read(len(MAGIC)) != MAGIC:
        file.close()
        raise ConfigError(f"{path} is not a recording of a gateway")
    events = _events(file, path)
    header = next(events, None)
    if not isinstance(header, dict) or header.get("version") != VERSION:
        found = header.get("version") if isinstance(header, dict) else "no header"
        raise ConfigError(f"{path}: version {found} of the format, but this program reads version {VERSION}")
    return header, events


def _events(file: Any, path: Path) -> Iterator[Any]:
    with file:
        number = 0
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if length > _MAX_FRAME_BYTES:
                raise ConfigError(f"{path}: frame {number} is damaged: {length} bytes")
            packed = file.read(length)
            if len(packed) < length:
                return  # the gateway was killed while it wrote this frame
            try:
                yield from _unpacked(zlib.decompress(packed))
            except (zlib.error, msgspec.DecodeError) as error:
                raise ConfigError(f"{path}: frame {number} is damaged: {error}") from None
            number += 1


def _unpacked(frame: bytes) -> Iterator[Any]:
    """Yield the msgpack values of a frame. Each is preceded by its length."""
    at = 0
    while at < len(frame):
        (length,) = _LENGTH.unpack_from(frame, at)
        at += _LENGTH.size
        yield msgspec.msgpack.decode(frame[at : at + length])
        at += length
