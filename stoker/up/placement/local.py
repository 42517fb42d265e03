"""LocalPlacement: every part is a process of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.base.address import local_host
from stoker.up.part import FleetPart
from stoker.up.part_log import PartLog
from stoker.up.process import PartProcess
from stoker.up.rotating_file import RotatingFile
from stoker.up.supervisor import StopMode


@dataclass(frozen=True, slots=True)
class LocalPart:
    part: FleetPart
    process: PartProcess

    @property
    def log(self) -> PartLog:
        return self.process.log

    @property
    def where(self) -> str:
        return str(self.process.pid)

    @property
    def nodes(self) -> tuple[str, ...]:
        return ()

    @property
    def pid(self) -> int | None:
        return self.process.pid

    async def wait(self) -> int:
        return await self.process.wait()

    def write(self, file: str, text: str) -> None:
        pass  # addresses on this machine do not change

    def stop(self, how: StopMode) -> None:
        self.process.stop(how)


class LocalPlacement:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def reach(self, host: str) -> str:
        return local_host(host)

    async def start(self, part: FleetPart, file: RotatingFile) -> LocalPart:
        process = await PartProcess.start(part.command, {**self._environment, **part.env}, file)
        return LocalPart(part, process)

    def close(self) -> None:
        pass
