"""The demo's provider as a process: ``python -m resilient.surface.demo.serve --log FILE``.

Three ports on 127.0.0.1: the second belongs to the account that goes down, the third to the webhook that takes events.
While one is down its listening socket is closed and open connections are cut, so a client gets what a dead host gives:
resets, then refused connections. The first line of standard output is ``{"steady": <port>, "fragile": <port>, "sink":
<port>}`` once all listen. Ends on SIGTERM, or when its standard input closes, which it does when the parent dies.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from resilient.surface.demo.accounts import Plan
from resilient.surface.demo.provider import Provider
from resilient.surface.demo.sink import Sink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.applications import Starlette

_HOST: Final = "127.0.0.1"


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: two of them share this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Port:
    """One listening port that can be closed and opened again."""

    def __init__(self, app: Starlette) -> None:
        self._config = uvicorn.Config(
            app, log_level="critical", access_log=False, lifespan="off", timeout_keep_alive=60
        )
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.number = 0

    async def open(self) -> None:
        """Listen, on the same number as before."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, self.number))
        self.number = listener.getsockname()[1]
        self._server = _Server(self._config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:  # noqa: ASYNC110 - uvicorn offers no event
            await asyncio.sleep(0.01)

    async def cut(self) -> None:
        """Stop listening and cut every connection, in the middle of an answer if need be."""
        if self._server is None or self._task is None:
            return
        for listener in self._server.servers:
            listener.close()
        for connection in list(self._server.server_state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        self._server.force_exit = self._server.should_exit = True
        await self._task


async def serve(log: Path, plan: Plan, secret: str) -> None:
    """Run the provider until told to stop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is the parent's affair
    outages: list[asyncio.Task[None]] = []

    async def outage() -> None:
        await asyncio.sleep(plan.unavailable)
        await fragile.cut()
        await asyncio.sleep(plan.refused)
        await fragile.open()

    async def absence() -> None:
        await asyncio.sleep(0.1)  # its last answer may still leave
        await third.cut()
        provider.write({"t": provider.clock(), "decision": "sink_away"})
        await asyncio.sleep(plan.sink_away)
        provider.write({"t": provider.clock(), "decision": "sink_back"})
        await third.open()

    with log.open("a", encoding="utf-8") as file:
        provider = Provider(plan, file, go_down=lambda: outages.append(asyncio.create_task(outage())))
        sink = Sink(
            secret, provider.write, provider.clock, plan.sink_away_after,
            go_away=lambda: outages.append(asyncio.create_task(absence())),
        )  # fmt: skip
        steady, fragile, third = Port(provider.app()), Port(provider.app()), Port(sink.app())
        for port in (steady, fragile, third):
            await port.open()
        ports = {"steady": steady.number, "fragile": fragile.number, "sink": third.number}
        sys.stdout.write(json.dumps(ports) + "\n")
        sys.stdout.flush()
        await loop.connect_read_pipe(lambda: _UntilClosed(stop), sys.stdin)
        await stop.wait()
        for task in outages:
            task.cancel()
        for port in (steady, fragile, third):
            await port.cut()


class _UntilClosed(asyncio.Protocol):
    """Sets an event when the other end of a pipe is gone."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._stop.set()


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description="The demo's provider")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--plan", type=json.loads, default={})
    parser.add_argument("--secret", required=True, help="of the webhook")
    options: Any = parser.parse_args(arguments)
    asyncio.run(serve(options.log, Plan(**options.plan), options.secret))


if __name__ == "__main__":
    main()
