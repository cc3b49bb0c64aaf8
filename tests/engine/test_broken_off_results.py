"""Whatever breaks off the writing of results, and whenever: each is written once and counted once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
import sqlalchemy as sa
from sqlmodel import Session

from resilient import Job, Resilient, handler
from resilient.core.jobs.outcomes import Transition
from resilient.engine.run import completer as completer_module
from resilient.engine.run.completer import Completer, Results
from resilient.store.db.dialect import ID
from resilient.store.jobs.finishing import Finish
from tests.helpers import LIMIT, until

ROWS = 6
BAD = 4  # the one that is refused, so that the batch is halved


@handler("work")
async def work(job: Job[None]) -> None: ...


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(completer_module, "HELD_PAUSE", 0.0)
    monkeypatch.setattr(completer_module, "retry_pause", lambda *_: 0.0)


@pytest.fixture
async def app(database_url):
    async with Resilient(database_url, handlers=[work], upgrade=False) as app:
        yield app


class Heard:
    """What a completer tells of the results it writes."""

    def __init__(self, app, on_refused=lambda *_: None):
        self.results = Counter()
        self.completer = Completer(app.database, lambda _: (), self._written, on_refused, app.poke, roll=lambda: 0.0)

    def _written(self, ids, stale, _released):
        self.results.update(id_ for id_, _ in ids if id_ not in stale)

    @property
    def counts(self):
        return self.completer.written, self.completer.stale, set(self.results.values())


async def running(app, count):
    """Jobs that run, as their rows say."""
    for n in range(count):
        await app.enqueue(work, resource_key=f"p/{n}")
    rows = await app.database.transaction(
        lambda c, d: d.run(c, "UPDATE {job} SET state = 'running' RETURNING id, version, resource_key", id=ID).all()
    )
    return sorted(rows, key=lambda row: row.resource_key)


def dead(row):
    return Finish(row.id, row.version, Transition("dead", "dead", error="e", error_kind="bug"))


def named(name):
    return next(task for task in asyncio.all_tasks() if task.get_name() == name)


def wrapped(monkeypatch, database, breaks_off):
    """``await breaks_off(args)`` comes before each transaction, and may raise; what it returns comes after it."""
    real = database.transaction

    async def transaction(fn, *args, **options):
        after = await breaks_off(args)
        effective = await real(fn, *args, **options)
        if after:
            await after()
        return effective

    monkeypatch.setattr(database, "transaction", transaction)


async def cancel_of_what_it_waits_for():
    raise asyncio.CancelledError


async def cancel_of_every_task():
    """As `asyncio.run` does once its main coroutine has ended."""
    for name in ("resilient-completer", "resilient-held-results"):
        for task in asyncio.all_tasks():
            if task.get_name() == name:
                task.cancel()
    await asyncio.sleep(0)


async def lost_cancel():
    """As psycopg may lose one that comes in the moment of an answer."""
    with contextlib.suppress(asyncio.CancelledError):
        await cancel_of_every_task()


ENDS = pytest.mark.parametrize("end", [cancel_of_what_it_waits_for, cancel_of_every_task, lost_cancel])


@ENDS
@pytest.mark.parametrize("is_committed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("part", [0, 1, 3])
async def test_each_result_is_written_and_counted_once(app, monkeypatch, end, is_committed, part):
    """One of them is refused, so that the batch is written in parts; one of those is broken off."""
    heard, parts = Heard(app), 0

    async def breaks_off(args):
        nonlocal parts
        parts += 1
        if parts == part + 1:
            if is_committed:
                return end
            await end()
        return None

    rows = await running(app, ROWS)
    wrapped(monkeypatch, app.database, breaks_off)
    for n, row in enumerate(rows):
        if n % 3 == 0:
            heard.completer.finish(dead(row), row.resource_key)
        else:
            heard.completer.follow(row.id, row.version, [app.ground.encoder.encode(work, None, "p/after")])
            heard.completer.succeed(row.id, row.version, "not JSON" if n == BAD else "1", row.resource_key)
    await heard.completer.start()
    async with asyncio.timeout(LIMIT):
        await heard.completer.close()
    assert parts > 5
    refused = 1  # its follow-up jobs are, in the same statement, and that is for others to decide
    assert heard.counts == (ROWS - refused, 0, {1})
    assert await app.jobs.count(state="ready") == ROWS - refused - 2
    assert not heard.completer._follow_ups


@ENDS
@pytest.mark.parametrize("is_committed", [False, True], ids=["before", "after"])
async def test_successes_alone_are_written_and_counted_once(app, monkeypatch, end, is_committed):
    heard, tries = Heard(app), 0

    async def breaks_off(args):
        nonlocal tries
        tries += 1
        if tries == 1:
            if is_committed:
                return end
            await end()
        return None

    rows = await running(app, ROWS)
    wrapped(monkeypatch, app.database, breaks_off)
    for row in rows:
        heard.completer.succeed(row.id, row.version, None, row.resource_key, is_followed=False)
    await heard.completer.start()
    async with asyncio.timeout(LIMIT):
        await heard.completer.close()
    assert heard.counts == (ROWS, 0, {1})


async def test_a_cancel_of_what_a_save_waits_for_does_not_end_the_writer(app, monkeypatch):
    """Whoever waits until everything is written waits in vain otherwise: nobody starts it again before its close."""
    heard, tries = Heard(app), 0

    async def breaks_off(args):
        nonlocal tries
        tries += 1
        if tries == 1:
            raise asyncio.CancelledError

    (row,) = await running(app, 1)
    wrapped(monkeypatch, app.database, breaks_off)
    heard.completer.succeed(row.id, row.version, None, row.resource_key)
    await heard.completer.start()
    async with asyncio.timeout(LIMIT / 5):
        await heard.completer.flushed()
    assert heard.counts == (1, 0, {1})
    await heard.completer.close()


async def test_a_mistake_over_a_part_leaves_the_others(app, monkeypatch, caplog):
    heard, saves = Heard(app), 0
    real = heard.completer._saved

    def saved(*args, **options):
        nonlocal saves
        saves += 1
        if saves == 2:
            raise LookupError("a mistake of the engine's")
        real(*args, **options)

    monkeypatch.setattr(heard.completer, "_saved", saved)
    for n, row in enumerate(await running(app, ROWS)):
        heard.completer.succeed(row.id, row.version, "not JSON" if n == BAD else "1", row.resource_key)
    await heard.completer.start()
    async with asyncio.timeout(LIMIT):
        await heard.completer.close()
    assert heard.counts == (ROWS, 0, {1})
    assert "a mistake of the engine's" in caplog.text


async def test_what_somebody_holds_is_put_aside_once(postgres_url, monkeypatch):
    async with Resilient(postgres_url, handlers=[work], upgrade=False) as app:
        rows, heard, tries = await running(app, 2), Heard(app), 0

        async def breaks_off(args):
            nonlocal tries
            tries += 1
            if tries == 1:
                raise asyncio.CancelledError

        wrapped(monkeypatch, app.database, breaks_off)
        monkeypatch.setattr(completer_module, "HELD_PAUSE", LIMIT)
        heard.completer._take_care()
        with Session(app.database.sync_engine) as session:
            session.execute(sa.text("SELECT 1 FROM resilient_job WHERE id = :id FOR UPDATE"), {"id": rows[0].id})
            for row in rows:
                heard.completer.succeed(row.id, row.version, None, row.resource_key)
            await heard.completer.start()
            await until(lambda: tries and heard.completer._held)
        assert Counter(id_ for results in heard.completer._held for id_ in results.ids) == {row.id: 1 for row in rows}
        await heard.completer.abandon()


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_the_writer_of_what_is_put_aside_is_replaced(app, monkeypatch, how):
    heard, is_away, is_faulty = Heard(app), True, False

    async def breaks_off(args):
        if is_away:
            raise LookupError("the driver is broken")

    def pause(*_):
        if is_faulty:
            raise LookupError("a mistake of the engine's")
        return 0.0

    (row,) = await running(app, 1)
    wrapped(monkeypatch, app.database, breaks_off)
    monkeypatch.setattr(completer_module, "retry_pause", pause)
    heard.completer.succeed(row.id, row.version, None, row.resource_key)
    await heard.completer.start()
    await until(lambda: heard.completer._held)
    first = named("resilient-held-results")
    if how == "cancelled":
        first.cancel()
    else:
        is_faulty = True
    await asyncio.wait([first])
    is_away = is_faulty = False
    async with asyncio.timeout(LIMIT / 5):
        await heard.completer.flushed()
    assert heard.counts == (1, 0, {1})
    await heard.completer.close()


async def test_a_result_whose_refusal_cannot_be_told_is_kept(app, caplog):
    """Its follow-up jobs are refused, and who decides about that fails once."""
    refusals = []

    def on_refused(id_, _fence, error):
        refusals.append(error)
        if len(refusals) == 1:
            raise LookupError("a mistake of the engine's")
        heard.completer.finish(dead(row), row.resource_key)

    heard = Heard(app, on_refused)
    (row,) = await running(app, 1)
    request = app.ground.encoder.encode(work, None, "p/after")
    heard.completer.follow(row.id, row.version, [request._replace(row=request.row._replace(payload="not JSON"))])
    heard.completer.succeed(row.id, row.version, "1", row.resource_key)
    await heard.completer.start()
    async with asyncio.timeout(LIMIT):
        await heard.completer.close()
    assert len(refusals) == 2
    assert heard.counts == (1, 0, {1})
    assert (await app.jobs.get(row.id)).state == "dead"
    assert "a mistake of the engine's" in caplog.text
    assert not heard.completer._follow_ups


async def test_results_that_are_being_written_count_for_the_backlog(app, monkeypatch):
    heard, tries = Heard(app), []

    async def breaks_off(args):
        tries.append(heard.completer.full)
        if len(tries) == 1:
            raise LookupError("the driver is broken")

    (row,) = await running(app, 1)
    wrapped(monkeypatch, app.database, breaks_off)
    monkeypatch.setattr(completer_module, "BACKLOG", 0)
    heard.completer.succeed(row.id, row.version, None, row.resource_key)
    await heard.completer.start()
    async with asyncio.timeout(LIMIT):
        await heard.completer.close()
    assert tries == [True, True]
    assert not heard.completer.full


async def test_a_writer_that_fails_says_so_and_is_not_begun_again(app, monkeypatch, caplog):
    heard = Heard(app)

    def rounds(_results):
        raise LookupError("a mistake of the engine's")

    monkeypatch.setattr(Results, "rounds", rounds)
    (row,) = await running(app, 1)
    heard.completer.succeed(row.id, row.version, None, row.resource_key)
    await heard.completer.start()
    async with asyncio.timeout(LIMIT / 5):
        await heard.completer.close()
    assert caplog.text.count("a writer of results has failed") == 1
    assert "a mistake of the engine's" in caplog.text
    assert heard.counts == (0, 0, set())
