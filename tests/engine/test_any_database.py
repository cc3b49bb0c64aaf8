"""The same program on every way to hand over a database: an own schema, the application's engines; all of it works."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from resilient import Fixed, Item, Job, Limit, Provider, Resilient, Retry, Schedule, SyncJob, handler
from resilient.store.db import schema as schemas
from resilient.store.db.database import Database
from resilient.surface.cli import main
from tests.helpers import LIMIT

SCHEMA = "ours"


@handler("push", retry=Retry(max_attempts=5, delay=Fixed(0)))
async def push(job: Job[int]) -> int:
    (await job.client.post("/push", json=job.payload)).raise_for_status()
    return job.payload


@handler("thread")
def thread(job: SyncJob[int]) -> int:
    job.client.post("/push", json=job.payload).raise_for_status()
    return job.payload


@handler("fails", retry=Retry(max_attempts=1))
async def fails(job: Job[None]) -> None:
    raise ValueError("always")


@handler("tick")
async def tick(job: Job[None]) -> None:
    """Nothing to do."""


class Api:
    """Counts what it got; the first request of account 2 is throttled."""

    def __init__(self):
        self.got = []

    async def __call__(self, _scope, receive, send):
        body = (await receive())["body"]
        self.got.append(json.loads(body))
        throttled = self.got.count(7) == 1 and self.got[-1] == 7
        headers = [(b"content-length", b"2"), *([(b"retry-after", b"0")] if throttled else [])]
        await send({"type": "http.response.start", "status": 429 if throttled else 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


def sync_engine(url):
    return sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))


def async_engine(url):
    return create_async_engine(
        url.replace("postgresql://", "postgresql+psycopg://").replace("sqlite://", "sqlite+aiosqlite://")
    )


WAYS = [("sqlite", "engine"), ("sqlite", "async engine")]
WAYS += [("postgresql", "engine"), ("postgresql", "async engine"), ("postgresql", "schema")]


@pytest.fixture(params=WAYS, ids="-".join)
async def place(request):
    """How the database is handed over: ``target``, and the schema."""
    backend, way = request.param
    if way == "schema":
        url = await _in_schema(request.getfixturevalue("postgres_server"))
        yield SimpleNamespace(url=url, target=url, schema=SCHEMA)
        return
    url = request.getfixturevalue("sqlite_url" if backend == "sqlite" else "postgres_url")
    target = sync_engine(url) if way == "engine" else async_engine(url)
    yield SimpleNamespace(url=url, target=target, schema=None)
    if (closing := target.dispose()) is not None:
        await closing


async def _in_schema(server):
    url = server.url(server.create())
    database = Database(url, schema=SCHEMA)
    await schemas.upgrade(database)
    await database.close()
    return url


@pytest.fixture
async def app(place, serve):
    api = Api()
    provider = Provider(name="api", base_url=serve(api))
    app = Resilient(
        place.target,
        handlers=[push, thread, fails, tick],
        providers=[provider],
        limits={"api/*": [Limit(500, per=1)], "api/1": [Limit(500, per=1, counts="jobs")]},
        concurrency={"api/1": 2},
        schedules=[Schedule(tick, every="1s", resource_key="api/9", name="ticking", overlap="allow")],
        schema=place.schema,
        upgrade=False,
    )
    app.api = api
    yield app
    await app.close()


async def until(condition, what):
    with suppress(TimeoutError):
        async with asyncio.timeout(LIMIT):
            while not await condition():  # noqa: ASYNC110 - a database's state
                await asyncio.sleep(0.02)
            return
    raise AssertionError(what)


async def test_all_of_it_works(app, place):
    """Enqueue in every way, limits, caps, a throttle, a failure, a schedule, alerts, changes, a worker's whole life."""
    numbers = list(range(1, 13))
    await app.enqueue_many(push, [Item(n, resource_key=f"api/{n % 3}") for n in numbers[:6]])
    for n in numbers[6:]:
        await app.enqueue((push, thread)[n % 2], n, resource_key=f"api/{n % 3}")
    unique = [await app.enqueue(push, 99, resource_key="api/1", unique_key="once") for _ in range(2)]
    assert [one.created for one in unique] == [True, False]
    later = await app.enqueue(push, 100, resource_key="api/0", delay=3600)
    bad = await app.enqueue(fails, resource_key="api/0")
    worker = app.worker(concurrency=4)
    running = asyncio.create_task(worker.run(signals=False))

    async def done():
        left = await app.jobs.count(state=["ready", "running", "scheduled"], kind=["push", "thread", "fails"])
        return left == 1 and await app.jobs.count(kind="tick", state="succeeded") >= 1

    await until(done, await app.jobs.list())
    worker.stop()
    await running
    assert sorted(app.api.got) == sorted([*numbers, 99, 7])  # 7 was throttled once
    assert (await app.jobs.get(bad.id)).state == "dead"
    assert [one.kind for one in await app.jobs.attempts(bad.id)] == ["bug"]
    assert (await app.jobs.cancel(later.id)).cancelled == 1
    assert "dead" in {one.name for one in await app.alerts.list()}
    assert await app.resources.pause("api/0")
    stopped = await app.enqueue(push, 101, resource_key="api/0")
    await app.worker().drain(timeout=LIMIT)
    assert "paused" in str(await app.jobs.why(stopped.id))
    await app.resources.resume("api/0")
    await app.worker().drain(timeout=LIMIT)
    assert (await app.jobs.get(stopped.id)).result == 101
    assert (await app.prune(older_than=0.001)).succeeded > 10
    assert tables(place) == [place.schema or ("main" if app.database.is_sqlite else "public")]


def tables(place):
    """The schemas with our tables."""
    url = place.url.replace("postgresql://", "postgresql+psycopg://")
    engine = sa.create_engine(url)
    inspector = sa.inspect(engine)
    found = [s for s in inspector.get_schema_names() if "resilient_job" in inspector.get_table_names(schema=s)]
    engine.dispose()
    return found


async def test_in_the_applications_own_transaction(app, place):
    """Its engine, its session: a rolled-back job is none, a committed one runs."""
    engine = place.target
    if isinstance(engine, str):
        engine = sync_engine(engine)
    if isinstance(engine, sa.Engine):
        with Session(engine) as session:
            app.enqueue_sync(push, 1, resource_key="api/5", session=session)
            session.rollback()
            app.enqueue_sync(push, 2, resource_key="api/5", session=session)
            session.commit()
        if engine is not place.target:
            engine.dispose()
    else:
        async with AsyncSession(engine) as session:
            await app.enqueue(push, 1, resource_key="api/5", session=session)
            await session.rollback()
            await app.enqueue(push, 2, resource_key="api/5", session=session)
            await session.commit()
    assert await app.worker().drain(timeout=LIMIT) == 1
    assert app.api.got == [2]


@pytest.mark.parametrize("place", [("postgresql", "schema")], indirect=True, ids=["schema"])
async def test_the_command_line_in_a_schema(app, place, capsys):
    def run(*arguments):
        status = main(["--database", place.url, "--schema", SCHEMA, *arguments])
        out, err = capsys.readouterr()
        assert (status, err) == (0, ""), (arguments, status, out, err)
        return out

    bad = await app.enqueue(fails, resource_key="api/0")
    good = await app.enqueue(tick, resource_key="api/1")
    await app.worker().drain(timeout=LIMIT)
    call = asyncio.to_thread
    assert "The tables fit" in await call(run, "db", "check")
    assert {one["id"] for one in json.loads(await call(run, "jobs", "list", "--json"))["jobs"]} == {
        str(bad.id),
        str(good.id),
    }
    assert "ValueError: always" in await call(run, "dead", "show", str(bad.id))
    assert "1" in await call(run, "dead", "replay", str(bad.id))
    assert (await app.jobs.get(bad.id)).state == "ready"
    await call(run, "resources", "pause", "api/0")
    assert "paused" in await call(run, "resources", "show", "api/0")
    assert "api/0" in await call(run, "status")
    await call(run, "prune", "--older-than", "1s", "--dry-run")


async def test_a_closed_app_opens_anew_when_it_is_used_again(database_url):
    """A program's one app, entered by the lifespan of each of its tests."""

    @handler("a.run")
    async def run(job: Job[None]) -> None: ...

    app = Resilient(database_url, handlers=[run])
    for done in (2, 4):
        async with app:
            await app.enqueue(run, resource_key="a/b")
            await asyncio.to_thread(app.sync.enqueue, run, resource_key="a/b")
            assert await app.worker().drain() == 2
            assert await app.jobs.count(state="succeeded") == done
        assert app.database._owned == []
    assert app.sync.enqueue(run, resource_key="a/b").created
    await app.close()
