"""A real HTTP server on this machine that behaves as badly as asked, and hooks that write down their calls."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import struct
import threading
from datetime import UTC, datetime
from urllib.parse import parse_qs

import pytest

from resilient import Provider, ResourceStopped
from resilient.core.provider.facts import GENERIC
from resilient.wire.requests.client import build_async_client
from resilient.wire.requests.hooks import Permit
from resilient.wire.requests.pool import Pool, PoolSettings
from resilient.wire.requests.request_log import RequestLog
from tests.helpers import LIMIT
from tests.serving import Server

NOW = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
# What a test does not ask for does not happen while the machine stands still.
UNHURRIED = {"connect": LIMIT, "read": LIMIT, "write": LIMIT, "wait": LIMIT, "whole": LIMIT, "error_whole": LIMIT}


class Recorder:
    """`RequestHooks` without an engine: its log has the calls in their order."""

    def __init__(self, key="api/acct", base_key="job-1"):
        self.resource_key, self.base_key = key, base_key
        self.log = []
        self.requests = []
        self.answers = []
        self.failures = []
        self.marks = {}
        self.effects = []  # of cleared marks: whether they took effect
        self.credentials = {}
        self.refreshes = []  # the credentials each refresh brings
        self.stop_from = None  # refuse from this admission on
        self.on_mark = None
        self.probing = False
        self.cut_by_us = None  # whether the last answer that was cut off was so for want of room
        self.late = []  # what `again` raises, or None, each time a permit is found late

    def now(self):
        return NOW

    @property
    def steps(self):
        return [step for step, *_ in self.log]

    async def admit(self, request):
        self.requests.append(request)
        self.log.append(("admit", request.key, request.cost))
        if self.stop_from is not None and len(self.requests) >= self.stop_from:
            raise ResourceStopped(request.key, "cooldown")
        return Permit(request, headers=dict(self.credentials), probing=self.probing)

    async def mark(self, permit):
        self.log.append(("mark", permit.request.name))
        if self.on_mark is not None:
            raise self.on_mark
        self.marks[permit.request.name] = permit.request.body_hash

    def clear(self, permit, *, took_effect):
        self.effects.append(took_effect)
        self.log.append(("clear", permit.request.name))
        del self.marks[permit.request.name]

    def is_late(self, _permit):
        return bool(self.late)

    async def again(self, permit):
        self.log.append(("again", permit.request.name))
        if (error := self.late.pop()) is not None:
            raise error

    def cut_off(self, permit, *, by_us=False):
        self.cut_by_us = by_us
        self.log.append(("cut_off", permit.request.name))

    async def answered(self, _permit, answer, failure):
        self.log.append(("answered", answer.status, failure and failure.kind))
        self.answers.append((answer, failure))

    async def failed(self, _permit, failure):
        self.log.append(("failed", failure.kind, failure.code))
        self.failures.append(failure)

    def abandoned(self, permit):
        self.log.append(("abandoned", permit.request.name))

    async def connection(self, _account):
        return None

    async def refreshed(self, _permit, _failure):
        self.log.append(("refreshed",))
        if not self.refreshes:
            return False
        self.credentials = self.refreshes.pop(0)
        return True


@pytest.fixture
def hooks():
    return Recorder()


@pytest.fixture
def client(hooks, pool, server):
    """``client(provider, pool=...)``: a job's client whose base URL is the server's."""

    def build(provider=GENERIC, *, over=None, base_url=None, into=hooks):
        request_log = RequestLog(into, provider, base_url or "")
        found = build_async_client(request_log, over or pool, base_url or provider.base_url or server.url)
        found.request_log = request_log
        return found

    return build


@pytest.fixture
def provider(server):
    """``provider(**facts)``: a provider that lives at the server."""

    def declare(**facts):
        return Provider(name="api", base_url=server.url, **facts)

    return declare


@pytest.fixture
async def pool():
    found = Pool(PoolSettings(**UNHURRIED, tries=1, largest=1_000_000))
    yield found
    await found.aclose()


@pytest.fixture
async def patient():
    """A pool that repeats within a call."""
    found = Pool(PoolSettings(**UNHURRIED, tries=3, tries_within=LIMIT))
    yield found
    await found.aclose()


class Seen(list):
    """The requests a server received, as (method, path, headers, body)."""

    def named(self, name):
        return [headers.get(name) for _, _, headers, _ in self]


class App:
    """Answers as its query says: ?status=503&h=retry-after:5&body={...}&times=1 (then 200).

    ``?hold=1``: no answer before `go` is set.
    """

    def __init__(self):
        self.seen = Seen()
        self.go = threading.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        query = {k: v[-1] for k, v in parse_qs(scope["query_string"].decode()).items()}
        self.seen.append((scope["method"], scope["path"], headers, body))
        await self.answer(scope["path"], query, headers, send)

    async def answer(self, path, query, headers, send):
        while "hold" in query and not self.go.is_set():  # noqa: ASYNC110 - the test is in another thread
            await asyncio.sleep(0.01)
        if path == "/bearer":
            query["status"] = "200" if headers.get("authorization") == "Bearer fresh-token" else "401"
        status = int(query.get("status", 200))
        if "times" in query and len(self.seen) > int(query["times"]):
            status = 200
        content = query.get("body", json.dumps({"ok": True})).encode()
        out = [(b"content-type", query.get("type", "application/json").encode())]
        for pair in query.get("h", "").split("|"):
            if pair:
                name, _, value = pair.partition(":")
                out.append((name.encode(), value.encode()))
        if path == "/loop":
            status, query["location"] = 302, "/loop"
        if path == "/bomb":
            content = gzip.compress(b"a" * 50_000_000)
            out.append((b"content-encoding", b"gzip"))
        if "location" in query:
            out.append((b"location", query["location"].encode()))
        out.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": out})
        await send({"type": "http.response.body", "body": content})


@pytest.fixture(scope="module")
def _server():
    running = Server(App()).start()
    yield running
    running.stop()


@pytest.fixture
def server(_server):
    _server.app.seen.clear()
    _server.app.go.clear()
    yield _server
    _server.app.go.set()


@pytest.fixture(scope="module")
def _stranger():
    running = Server(App()).start()
    yield running
    running.stop()


@pytest.fixture
def stranger(_stranger):
    _stranger.app.seen.clear()
    return _stranger


@pytest.fixture
def rude():
    return _rude


@contextlib.asynccontextmanager
async def _rude(behave):
    """A server at the level of bytes; ``behave(reader, writer)`` is called once the request's head has come."""
    received, tasks = [], set()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())  # one that waits for ever is referred to by nobody else
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            received.append(await reader.readuntil(b"\r\n\r\n"))
            await behave(reader, writer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", received
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def reset():
    return _reset


def _reset(writer):
    """Close with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.fixture
def closed_port():
    """A port nobody listens on: it is taken, so that no other process gets it meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
