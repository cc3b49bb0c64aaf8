"""A TCP proxy in front of PostgreSQL that can lose the answer to a commit: it forwards COMMIT and cuts the line.

It runs in a thread of the test. `Proxy.lose` names a piece of SQL: the next ``times`` transactions that contain it are
committed by the server, and nobody tells the client. `Proxy.cut` breaks the line before such a piece of SQL reaches the
server, `go_away` refuses and breaks every line until `away` is false again, `hole` passes nothing on and says nothing.
Only plain connections (sslmode=disable) can be read along.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

from tests.helpers import LIMIT

COMMIT = b"COMMIT\x00"  # the whole statement: BEGIN may name READ COMMITTED
COMMITTED = b"COMMIT\x00"  # the server's tag of a completed commit


class Listener:
    """Listens on 127.0.0.1, in a thread of its own, for what talks to a server's Unix socket (`_serve`)."""

    def __init__(self, socket_path):
        self.path = str(socket_path)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        self._server = self._ask(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        self._ask(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT)
        self._loop.close()

    def url(self, name):
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}?sslmode=disable&gssencmode=disable"

    def _ask(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT)

    async def _close(self):
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Proxy(Listener):
    """Passes everything on, but for what it is told to lose or to cut."""

    def __init__(self, socket_path):
        super().__init__(socket_path)
        self.lost = self.cuts = self.refused = 0
        self.away = self.hole = False
        self._needle, self._times = b"", 0
        self._cut, self._cuts, self._then_away = b"", 0, False
        self._lines = set()

    def lose(self, needle, times=1):
        """The answers to the next commits of transactions with this SQL in them."""
        self._needle, self._times = needle.encode(), times

    def cut(self, needle, times=1, *, away=False):
        """The lines of the next statements with this SQL in them, before they arrive; ``away``: and all others too."""
        self._cut, self._cuts, self._then_away = needle.encode(), times, away

    def go_away(self):
        """Break every line, and refuse new ones until `away` is false."""
        self.away = True
        self._loop.call_soon_threadsafe(self._break)

    def _break(self):
        for line in list(self._lines):
            line.abort()

    async def _serve(self, reader, writer):
        if self.away:
            self.refused += 1
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_unix_connection(self.path)
        line = _Line(self, writer, server_writer)
        self._lines.add(line)
        try:
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):  # the end of the test, or of the line
                await asyncio.gather(line.up(reader), line.down(server_reader))
        finally:
            self._lines.discard(line)
            for end in (writer, server_writer):
                end.close()


class _Line:
    """One client's connection."""

    def __init__(self, proxy, client, server):
        self.proxy, self.client, self.server = proxy, client, server
        self.marked = self.losing = False

    async def up(self, reader):
        """From the client: note transactions that contain the SQL, and their commit."""
        while data := await reader.read(65536):
            proxy = self.proxy
            if proxy._cuts and proxy._cut in data:
                proxy._cuts -= 1
                proxy.cuts += 1
                self.abort()
                if proxy._then_away:
                    proxy.away = True
                    proxy._break()
                return
            if proxy._times and proxy._needle in data:
                self.marked = True
            if self.marked and COMMIT in data:
                self.marked = False
                if proxy._times:
                    proxy._times -= 1
                    self.losing = True
            await self._pass(self.server, data)
        self.server.close()

    async def down(self, reader):
        """From the server; what answers a lost commit is swallowed, and the line cut once it is committed."""
        while data := await reader.read(65536):
            if self.losing:
                if COMMITTED in data:
                    self.proxy.lost += 1
                    self.client.transport.abort()
                    return
                continue
            await self._pass(self.client, data)
        self.client.close()

    def abort(self):
        for end in (self.client, self.server):
            end.transport.abort()

    async def _pass(self, end, data):
        while self.proxy.hole:  # noqa: ASYNC110 - the test is in another thread
            await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            end.write(data)
            await end.drain()
