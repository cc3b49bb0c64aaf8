"""HTTP servers of a test's own, on ports the system chose, which end at once.

uvicorn looks ten times a second whether it should end and then waits as long again: hundreds of tests with a server or
two would spend minutes on that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
from functools import cached_property

import uvicorn


@contextlib.asynccontextmanager
async def serving(app, **options):
    """A server in this loop; its address."""
    config = {"host": "127.0.0.1", "port": 0, "log_level": "critical", "lifespan": "off", "ws": "none", **options}
    server = uvicorn.Server(uvicorn.Config(app, **config))
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done()
        await asyncio.sleep(0.002)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        task.cancel()
        await asyncio.wait([task])
        for listening in server.servers:
            listening.close()
        await _accepted()
        for connection in list(server.server_state.connections):
            connection.transport.abort()


async def _accepted():
    """Every connection that was accepted has come to the server: until then only a task of asyncio's has its socket."""
    names = {task: getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()}
    if tasks := [task for task, name in names.items() if name == "_accept_connection2"]:
        await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def production(app, **options):
    """A server in this loop as it is in production: with its lifespan, from its start to its orderly end."""
    config = {"host": "127.0.0.1", "port": 0, "log_level": "critical", "lifespan": "on", "ws": "none", **options}
    server = uvicorn.Server(uvicorn.Config(app, **config))
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done(), "it could not start"
        await asyncio.sleep(0.002)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


class Certificate:
    """A certificate for 127.0.0.1 that nobody else trusts: its files ``key`` and ``cert``, made in ``folder``."""

    def __init__(self, folder):
        self.key, self.cert = str(folder / "key.pem"), str(folder / "cert.pem")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", self.key, "-out", self.cert,
             "-days", "1", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
            check=True, capture_output=True,
        )  # fmt: skip

    @cached_property
    def server(self):
        """A server's context."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context

    @cached_property
    def trusting(self):
        """A client's context that trusts it."""
        return ssl.create_default_context(cafile=self.cert)


class Latch:
    """An `asyncio.Event` for a server in a thread: set from any thread."""

    def __init__(self):
        self._event, self._loops, self._lock = asyncio.Event(), set(), threading.Lock()
        self._is_open = False

    async def wait(self):
        with self._lock:
            if self._is_open:
                return
            self._loops.add(asyncio.get_running_loop())
        await self._event.wait()

    def set(self):
        with self._lock:
            self._is_open = True
            for loop in self._loops:
                loop.call_soon_threadsafe(self._event.set)


class Server:
    """The same in a thread: ``with Server(app) as url``, or `start` and `stop`."""

    def __init__(self, app, **options):
        self.app, self.options, self.url = app, options, ""
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self):
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with serving(self.app, **self.options) as self.url:
            self._up.set()
            await self._end.wait()

    def start(self):
        self._thread.start()
        assert self._up.wait(60)
        return self

    def stop(self):
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)
        assert not self._thread.is_alive(), "it has not ended"

    def __enter__(self):
        return self.start().url

    def __exit__(self, *_):
        self.stop()
