"""The database fails at each step of a job: nothing is dead, charged or done twice, but for what nobody can know.

The provider takes no keys, so a second request is a second effect. The line to the database is cut at a named piece of
SQL, or its answer lost, and the database stays away until the engine has asked for it in vain.
"""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
from harness import new, put, states, wait
from proxy import Proxy
from sqlalchemy import text

from resilient import Job, Provider, Resilient, Retry, SyncJob, handler
from resilient.core.jobs import decide
from resilient.store.db import schema
from resilient.store.db.database import Database
from tests.helpers import LIMIT
from tests.serving import serving

pytestmark = pytest.mark.proof("test_every_cut.py: cut around each commit")

ONCE = Retry(max_attempts=1)  # charged once, it is dead
MARK, FINISH = "SET sent = ", "cancel_requested = false"


class Api:
    """Counts effects; ``on_push`` is called before the answer."""

    def __init__(self):
        self.pushes, self.on_push = 0, lambda: None

    async def __call__(self, _scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.pushes += 1
        self.on_push()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


@handler("plain", retry=ONCE, timeout=60)
async def plain(job: Job[dict]) -> None:
    (await job.client.post("/push", json={})).raise_for_status()


@handler("thread", retry=ONCE, timeout=60)
def thread(job: SyncJob[dict]) -> None:
    job.client.post("/push", json={}).raise_for_status()


@handler("progressing", retry=ONCE, timeout=60)
async def progressing(job: Job[dict]) -> None:
    (await job.client.post("/push", json={})).raise_for_status()
    await job.progress({"pushed": 1})


@handler("complete", retry=ONCE, timeout=60)
async def complete(job: Job[dict]) -> None:
    (await job.client.post("/push", json={})).raise_for_status()
    async with job.complete() as session:
        await session.execute(text("INSERT INTO mine VALUES (1)"))


@handler("complete_thread", retry=ONCE, timeout=60)
def complete_thread(job: SyncJob[dict]) -> None:
    job.client.post("/push", json={}).raise_for_status()
    with job.complete() as session:
        session.execute(text("INSERT INTO mine VALUES (1)"))


@handler("rows", retry=ONCE, timeout=60)
async def rows(job: Job[dict]) -> None:
    """No request at all."""
    async with job.complete() as session:
        await session.execute(text("INSERT INTO mine VALUES (1)"))


@handler("enqueues", retry=ONCE, timeout=60)
async def enqueues(job: Job[dict]) -> None:
    await job.app.enqueue(rows, {}, resource_key="api/2")


HANDLERS = [plain, thread, progressing, complete, complete_thread, rows, enqueues]


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """A job that met a database in trouble is tried again soon."""
    monkeypatch.setattr(decide, "DATABASE_PAUSE", 0.5)


@pytest.fixture(autouse=True)
def _borrowed():
    """After a session broke, SQLAlchemy replaces the pool and drops what others had borrowed; psycopg remarks it."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
async def api():
    found = Api()
    async with serving(found) as found.url:
        yield found


@pytest.fixture
async def behind(postgres, postgres_server, api):
    """``(proxy, app)``"""
    with postgres_server.connect(postgres.url.database) as c:
        c.execute("CREATE TABLE mine (n int)")
    with Proxy(next(postgres_server.data.glob(".s.PGSQL.*[0-9]"))) as proxy:
        url = f"postgresql://postgres@127.0.0.1:{proxy.port}/{postgres.url.database}?sslmode=disable&gssencmode=disable"
        app = Resilient(
            Database(url), handlers=HANDLERS, providers=[Provider(name="api", base_url=api.url)], upgrade=False
        )
        yield proxy, app
        await app.close()


async def until(condition, about=""):
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - other threads' and connections' state
            await asyncio.sleep(0.02)
    assert condition(), about


async def ended(proxy, app, database, kind, *, away=False):
    """Run one job of a kind to its end; the database comes back once it was asked for in vain."""
    id_ = (await app.enqueue(kind, {}, resource_key="api/1")).id
    worker = app.worker(concurrency=2, lease=30)
    running = asyncio.create_task(worker.run(signals=False))
    if away:
        await until(lambda: proxy.away and proxy.refused >= 4)
        proxy.away = False
    await until(lambda: states(database)[id_.hex].finished_at is not None)
    await worker.completer.flushed()
    worker.stop()
    async with asyncio.timeout(LIMIT):
        await running
    return states(database)[id_.hex]


def rows_written(postgres_server, database):
    with postgres_server.connect(database.url.database) as c:
        return c.execute("SELECT count(*) FROM mine").fetchone()[0]


PUSHING = [plain, thread, progressing, complete, complete_thread]
AWAY = pytest.mark.parametrize("away", [False, True], ids=["cut", "away"])


@AWAY
@pytest.mark.parametrize("kind", PUSHING, ids=lambda k: k.kind)
async def test_before_the_mark(behind, postgres, api, kind, away):
    proxy, app = behind
    proxy.cut(MARK, away=away)
    row = await ended(proxy, app, postgres, kind, away=away)
    assert (proxy.cuts, row.state, row.attempts, api.pushes) == (1, "succeeded", 0, 1)


@pytest.mark.parametrize("kind", PUSHING, ids=lambda k: k.kind)
async def test_the_answer_to_the_mark_is_lost(behind, postgres, api, kind):
    proxy, app = behind
    proxy.lose(MARK)
    row = await ended(proxy, app, postgres, kind)
    assert (proxy.lost, row.state, row.attempts, api.pushes) == (1, "succeeded", 0, 1)


@pytest.mark.parametrize("kind", PUSHING, ids=lambda k: k.kind)
async def test_after_the_mark_while_the_provider_answers(behind, postgres, api, kind):
    """The answer is known, whatever the database does: it waits for its end to be written."""
    proxy, app = behind
    api.on_push = proxy.go_away
    row = await ended(proxy, app, postgres, kind, away=True)
    assert (row.state, row.attempts, api.pushes) == ("succeeded", 0, 1)


@AWAY
@pytest.mark.parametrize("kind", [plain, thread, progressing], ids=lambda k: k.kind)
async def test_in_the_finish(behind, postgres, api, kind, away):
    proxy, app = behind
    proxy.cut(FINISH, away=away)
    row = await ended(proxy, app, postgres, kind, away=away)
    assert (proxy.cuts, row.state, row.attempts, api.pushes, row.sent) == (1, "succeeded", 0, 1, None)


@pytest.mark.parametrize("kind", PUSHING, ids=lambda k: k.kind)
async def test_the_answer_to_the_commit_of_the_finish_is_lost(behind, postgres, postgres_server, api, kind):
    proxy, app = behind
    proxy.lose(FINISH)
    row = await ended(proxy, app, postgres, kind)
    assert (proxy.lost, row.state, row.attempts, api.pushes, row.sent) == (1, "succeeded", 0, 1, None)
    assert rows_written(postgres_server, postgres) == ("complete" in kind.kind)


@AWAY
@pytest.mark.parametrize("where", ["INSERT INTO mine", FINISH])
async def test_a_transaction_without_a_request_is_made_again(behind, postgres, postgres_server, where, away):
    proxy, app = behind
    proxy.cut(where, away=away)
    row = await ended(proxy, app, postgres, rows, away=away)
    assert (proxy.cuts, row.state, row.attempts, row.last_error_kind) == (1, "succeeded", 0, None)
    assert rows_written(postgres_server, postgres) == 1


async def test_an_enqueue_of_a_handler_is_charged_to_nobody(behind, postgres):
    proxy, app = behind
    id_ = (await app.enqueue(enqueues, {}, resource_key="api/1")).id
    proxy.cut("INSERT INTO resilient_job", away=True)
    worker = app.worker(concurrency=1, lease=30)
    running = asyncio.create_task(worker.run(signals=False))
    await until(lambda: proxy.away and proxy.refused >= 4)
    proxy.away = False
    await until(lambda: states(postgres)[id_.hex].state != "running")
    row = states(postgres)[id_.hex]
    assert (row.state, row.attempts, row.last_error_kind) == ("scheduled", 0, "database")
    assert "does not answer" in row.last_error
    await until(lambda: states(postgres)[id_.hex].state == "succeeded")
    worker.stop()
    await running


@pytest.mark.parametrize("kind", [complete, complete_thread], ids=lambda k: k.kind)
@pytest.mark.parametrize("where", ["INSERT INTO mine", FINISH])
async def test_what_was_pushed_without_a_key_is_in_doubt_if_its_rows_are_lost(
    behind, postgres, postgres_server, api, kind, where
):
    """Neither pushed again nor called a bug: a person, or `reconcile`, decides about the rows."""
    proxy, app = behind
    proxy.cut(where)
    row = await ended(proxy, app, postgres, kind)
    assert (proxy.cuts, row.state, row.last_error_kind, row.last_error_code, api.pushes) == (
        1, "dead", "ambiguous", "database_unreachable", 1,
    )  # fmt: skip
    assert "POST /push #1 was answered, and then the engine's database failed the job" in row.last_error
    assert rows_written(postgres_server, postgres) == 0


async def test_the_mark_leaves_the_row_with_the_finish(behind, postgres, api):
    """Were the worker to crash before that, whoever finds the job must not push again."""
    proxy, app = behind
    proxy.cut(FINISH, away=True)
    id_ = (await app.enqueue(plain, {}, resource_key="api/1")).id
    worker = app.worker(concurrency=1, lease=30)
    running = asyncio.create_task(worker.run(signals=False))
    await until(lambda: proxy.cuts)
    assert list(states(postgres)[id_.hex].sent) == ["POST /push #1"]
    proxy.away = False
    await until(lambda: states(postgres)[id_.hex].state == "succeeded")
    assert states(postgres)[id_.hex].sent is None
    worker.stop()
    await running


def test_a_server_killed_and_started_under_load(own_postgres, crew, provider):
    """SIGKILL of every process of it, twice: all jobs succeed, none is charged, none pushed twice."""
    url = own_postgres.url(own_postgres.create())
    database = Database(url)
    schema.upgrade_sync(database)
    for _ in range(2):
        crew.start(url, "--provider", provider.url, "--slow", "0.02", "--lease", "20")
    ids = put(database, *(new(key=f"p/{n % 5}", payload={"n": n}, max_attempts=1) for n in range(150)))
    for _ in range(2):
        before = len(provider.arrivals())
        wait(lambda: len(provider.arrivals()) > before + 15, 60, about=crew.said)  # noqa: B023
        own_postgres.kill()
        own_postgres.start()
    database.close_sync()
    wait(lambda: all(row.finished_at for row in states(database, ids)), 90, about=crew.said)
    crew.stop()
    found = states(database, ids)
    assert [
        (row.state, row.attempts, row.last_error) for row in found if row.state != "succeeded" or row.attempts
    ] == []
    database.close_sync()
