"""Accepts connections and discards what they send: the target of an attack that no gateway has to bear.

python -m bench.support.null_sink PORT
"""

from __future__ import annotations

import argparse
import asyncio


class _Discard(asyncio.BufferedProtocol):
    _shared = bytearray(256 << 10)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._shared

    def buffer_updated(self, nbytes: int) -> None:
        pass


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Discard, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)

    import uvloop

    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
