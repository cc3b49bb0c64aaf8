"""An HTTP proxy in a thread of the test: it opens tunnels, or fails in one of the ways in which proxies fail."""

from __future__ import annotations

import asyncio
import contextlib

from tests.chaos.proxy import Listener

REFUSALS = {
    "407": b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n",
    "502": b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n",
}


class ConnectProxy(Listener):
    """``mode``: "open" lets through; "407" and "502" are its answers; "cut" hangs up, "mute" says nothing."""

    def __init__(self, mode="open"):
        super().__init__("")
        self.mode, self.heads = mode, []

    @property
    def address(self):
        return f"http://us:hush@127.0.0.1:{self.port}"

    async def _serve(self, reader, writer):
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head.decode())
            if self.mode == "mute":
                await reader.read()
            elif self.mode == "open":
                await self._tunnel(reader, writer, head.split(b" ")[1].decode())
            else:
                writer.write(REFUSALS.get(self.mode, b""))
                await writer.drain()

    async def _tunnel(self, reader, writer, place):
        host, _, port = place.rpartition(":")
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        with contextlib.closing(server_writer):
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_pass(reader, server_writer), _pass(server_reader, writer))


async def _pass(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
