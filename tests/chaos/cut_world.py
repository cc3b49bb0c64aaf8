"""The world of one cut: a provider on this machine, a program that is cut off, and another one that goes on.

`run` is one case: the first program begins what the shape says and works until the knife strikes, or to its end; then
time passes, and a second program does what is left. The shape's `judge` says which promises were broken.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from typing import ClassVar, NamedTuple
from urllib.parse import parse_qsl

import sqlalchemy as sa

from resilient import Resilient
from resilient.store.db.database import Database
from tests import invariants
from tests.helpers import LIMIT
from tests.idp import Idp

JSON = [(b"content-type", b"application/json")]
ROUNDS = 12
LEASE = 60.0
PASSES = 400  # seconds between two rounds: leases, delays and cooldowns are over


class World:
    """What the provider saw, and what handlers did; a dead program's words are heard by nobody."""

    def __init__(self, knife, clock):
        self.knife, self.clock, self.is_second = knife, clock, False
        self.requests, self.notes, self.hooks, self.published = [], [], [], []
        self.feeds, self.state, self.worker = {}, {}, None
        self.idp = Idp()

    @property
    def is_heard(self):
        return self.is_second or not self.knife.is_dead

    def note(self, text):
        if self.is_heard:
            self.notes.append(text)

    async def publish(self, message):
        if self.is_heard:
            self.published.append((message.id, message.event["data"]["name"]))

    async def answer(self, scope, receive, send):
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        if not self.is_heard:
            return  # whoever sent it is dead: it was never sent
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path, status, said = scope["path"], 200, {}
        if path.startswith("/feed/"):
            said = self._page(path, dict(parse_qsl(scope["query_string"].decode())))
        elif path == "/hook":
            self.hooks.append((headers["webhook-id"], json.loads(body)["data"]["name"]))
        else:
            self.requests.append((path, headers.get("idempotency-key")))
        content = json.dumps(said).encode()
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": content})

    def _page(self, path, query):
        """Two records a page; changes since a token; ``{"records": {id: version}}``."""
        records, after, since = self.feeds[path], int(query.get("after", 0)), int(query.get("since", 0))
        self.requests.append((path, f"{after} {since}"))
        ids = sorted(id_ for id_, version in records.items() if version > since)
        page = [id_ for id_ in ids if id_ > after][:2]
        said = {"items": [{"id": id_} for id_ in page]}
        if page and page[-1] != ids[-1]:
            return said | {"next": str(page[-1])}
        return said | {"sync": str(max(records.values()))}


class Place:
    """What the HTTP server serves: the world of the moment."""

    world = None

    async def __call__(self, scope, receive, send):
        world = self.world
        if not world.is_heard and scope["path"] in ("/token", "/me"):
            return
        await (world.idp if scope["path"] in ("/token", "/me") else world.answer)(scope, receive, send)


class Ground(NamedTuple):
    """One case's database: its address through the knife, and beside it."""

    cut_url: str
    url: str


def application(shape, world, url):
    database, options = Database(url, clock=world.clock.now), shape.options(world)
    return Resilient(database, deps=world, upgrade=False, handlers=shape.handlers, **options)


async def run(shape, world, ground, knife, cutting, ends=None):
    """The first program, cut; then the second. Returns what is broken; ``ends``: those of a run without a cut."""
    seed = application(shape, world, ground.url)
    await shape.before(seed, world)
    await _close(seed)
    with cutting:
        app = application(shape, world, ground.cut_url)
        await _cut(shape, world, app, knife)
    knife.is_put_away, world.is_second = True, True
    app = application(shape, world, ground.url)
    try:
        await shape.again(app, world)
        open_jobs = await _go_on(shape, app, world)
        broken = [f"still open: {one}" for one in open_jobs]
        broken += invariants.broken(app.database) + invariants.keep_house(app.database)
        broken += invariants.lives(app.database, replayed=shape.replayed)
        world.ends = Look(app).ends()
        if ends is not None and shape.is_steady and world.ends != ends:
            broken.append(f"ends: {dict(world.ends)}, undisturbed {dict(ends)}")
        return broken + await shape.judge(app, world, Look(app))
    finally:
        await _close(app)


async def _close(app):
    await app.close()
    await app.database.close()


async def _cut(shape, world, app, knife):
    """Until its end, or its death: then none of its tasks is left."""
    loop, others, death = asyncio.get_running_loop(), asyncio.all_tasks(), asyncio.Event()
    task = asyncio.create_task(_work(shape, world, app))

    def note():
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(death.set)

    knife.on_death = note
    async with asyncio.timeout(LIMIT):
        dying = asyncio.create_task(death.wait())
        await asyncio.wait([task, dying], return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if death.is_set() and world.worker is not None:
            for execution in list(world.worker.executor.running.values()):
                execution.lost = True  # its thread, which nothing can end, waits for the database no more
        while orphans := death.is_set() and asyncio.all_tasks() - others:
            for one in orphans:
                one.cancel()
            await asyncio.wait(orphans, timeout=0.1)
    if not knife.has_struck:
        task.result()
    await _close(app)


async def _work(shape, world, app):
    await shape.act(app, world)
    world.worker = app.worker(concurrency=4, lease=LEASE, grace=0)
    await world.worker.drain()


async def _go_on(shape, app, world):
    """Another worker, until nothing is open; what still is."""
    for _ in range(ROUNDS):
        world.clock.advance(PASSES)
        worker = app.worker(concurrency=4, lease=LEASE)
        await worker.sweeper.rescue()
        await worker.drain(timeout=LIMIT)
        rows = Look(app).jobs("finished_at IS NULL")
        if not rows and await shape.is_over(app, world):
            return []
    return [(row.kind, row.state) for row in rows] or ["the shape is not over"]


class Look:
    """The tables as they are now."""

    def __init__(self, app):
        self._database = app.database

    def _rows(self, query):
        def read(c, _d):
            return [dict(row._mapping) for row in c.execute(sa.text(query))]

        return list(map(_Row, self._database.transaction_sync(read)))

    def jobs(self, where="1 = 1"):
        return self._rows(f"SELECT * FROM resilient_job WHERE {where} ORDER BY id")

    def names(self):
        """The application's rows, in the order of their insertion."""
        return [row.name for row in self._rows("SELECT name FROM mine ORDER BY id")]

    def mine(self):
        return Counter(self.names())

    def ends(self):
        """What must be as in a run that nobody disturbed: a charge for a crash, or another result, is seen here."""
        return Counter((row.kind, row.state, row.attempts, str(row.result)) for row in self.jobs())

    def states(self):
        return Counter((row.kind, row.state) for row in self.jobs())


class _Row(dict):
    __getattr__ = dict.__getitem__


class Shape:
    """What one promise is about."""

    name, handlers, replayed, is_steady = "", (), False, True
    rows: ClassVar = {}  # of the application, by name
    states: ClassVar = {}  # of jobs at the end: (kind, state) -> how many

    def options(self, world):
        return {}

    async def before(self, app, world):
        """Before the first program: by nobody who is cut."""

    async def act(self, app, world):
        """By the program that is cut, before its worker."""

    async def again(self, app, world):
        """By the second program, before its worker."""

    async def is_over(self, app, world):
        return True

    async def judge(self, app, world, look):
        """What was promised and is not so."""
        found = []
        if look.mine() != Counter(self.rows):
            found.append(f"rows: {dict(look.mine())}, expected {self.rows}")
        if self.states and look.states() != Counter(self.states):
            found.append(f"states: {dict(look.states())}, expected {self.states}")
        return found + list(self.more(world, look))

    def more(self, world, look):
        return ()
