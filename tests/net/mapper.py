"""A program for `test_portmap.py`: listens on a port, keeps it mapped, and greets whoever connects.

Writes one JSON line for each report. Ends in order on SIGTERM.

    python -m tests.net.mapper PORT METHOD...
"""

import json
import signal
import sys
from functools import partial

import trio

from protocol.portmap import Mapping, keep_mapped

GREETING = b"mapped"


def report(mapping: Mapping | None) -> None:
    external = mapping and [mapping.external.host, mapping.external.port]
    print(json.dumps({"external": external, "method": mapping and mapping.method}), flush=True)


async def greet(stream: trio.SocketStream) -> None:
    async with stream:
        await stream.send_all(GREETING)


async def main(port: int, methods: list[str]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(trio.serve_tcp, greet, port))
            nursery.start_soon(partial(keep_mapped, port, on_change=report, methods=methods))
            async for _ in signals:
                nursery.cancel_scope.cancel()
                break


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), sys.argv[2:])
