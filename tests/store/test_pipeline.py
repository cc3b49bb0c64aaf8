"""Rounds of several statements: the server ends in the middle, the caller goes, or a pooler stands in between."""

import asyncio

import psycopg
import pytest
from sqlalchemy.exc import DBAPIError

from resilient import DatabaseUnreachable, Limit
from resilient.core.gates.policy import Policies
from resilient.engine.run import completer
from resilient.store.db import pipeline
from resilient.store.db.dialect import ID, TIME
from resilient.store.db.direct import direct
from resilient.store.gates import resources
from resilient.store.jobs import claim
from tests.invariants import broken
from tests.store.test_claim import ask, new
from tests.store.test_claim import put as put_jobs
from tests.store.test_direct import connections, keys, put

INSERT = (
    "INSERT INTO {resource} (key, created_at, updated_at) VALUES (:key, clock_timestamp(), clock_timestamp())"
    " RETURNING key"
)


@pytest.fixture
def quick(postgres_database):
    """A transaction that goes straight to the driver."""

    async def run(fn, *args):
        return await postgres_database.transaction(direct(fn), *args)

    return run


async def test_statements_that_wait_go_with_the_next_one_and_in_their_order(quick):
    def several(c, d):
        first = d.later(c, INSERT, {"key": "a"})
        second = d.later(c, INSERT, {"key": "b"})
        assert (first, second) == ([], [])
        count = d.run(c, "SELECT count(*) AS n, clock_timestamp() AS now FROM {resource}", now=TIME).one()
        assert count.n == 2
        return first.one().key, second.scalar(), first.rowcount

    assert await quick(several) == ("a", "b", 1)
    assert await quick(keys) == ["a", "b"]


async def test_what_waits_at_the_end_is_committed(quick):
    await quick(lambda c, d: d.later(c, INSERT, {"key": "a"}) and None)
    assert await quick(keys) == ["a"]


async def test_the_answers_are_there_after_the_commit(quick, postgres_url):
    def several(c, d):
        rows = d.later(c, INSERT, {"key": "a"})
        d.commit(c)
        with psycopg.connect(postgres_url) as other:
            assert other.execute("SELECT key FROM resilient_resource").fetchall() == [("a",)]
        return rows.one().key

    assert await quick(several) == "a"
    assert connections(postgres_url)[0] == 0


async def test_one_that_fails_in_the_middle_takes_the_round_and_its_commit_with_it(quick, postgres_url):
    def several(c, d):
        d.later(c, INSERT, {"key": "a"})
        d.later(c, "SELECT CAST(:payload AS json)", {"payload": "secret"})
        d.later(c, INSERT, {"key": "b"})
        d.commit(c)

    for _ in range(4):  # unprepared, prepared in the round that fails, and again
        with pytest.raises(DBAPIError, match="invalid input syntax") as caught:
            await quick(several)
        assert "secret" not in str(caught.value)
        assert await quick(keys) == []
    assert connections(postgres_url)[0] == 0


async def test_a_value_that_no_column_holds_is_refused_before_anything_is_sent(quick):
    def several(c, d):
        d.later(c, INSERT, {"key": "a"})
        d.run(c, INSERT, {"key": "nul \0"})

    with pytest.raises(DBAPIError, match="NUL"):
        await quick(several)
    assert await quick(keys) == []


@pytest.mark.parametrize("way", ["statement", "commit"])
async def test_a_session_that_ends_in_the_middle_of_a_round_leaves_nothing_and_believes_nothing(
    quick, postgres_url, way
):
    """The statements before it were executed, and the answers to them had arrived."""

    def cut(c, d):
        before = d.later(c, INSERT, {"key": "a"})
        d.later(c, "SELECT pg_terminate_backend(pg_backend_pid())")
        after = d.later(c, INSERT, {"key": "b"})
        try:
            d.commit(c) if way == "commit" else d.run(c, "SELECT 1")
        finally:
            assert (before, after) == ([], [])

    for _ in range(3):
        with pytest.raises(DatabaseUnreachable):
            await quick(cut)
        assert await quick(keys) == []
    assert connections(postgres_url)[0] == 0


async def test_a_caller_that_goes_in_the_middle_of_a_round_leaves_nothing(quick, postgres_url):
    def slow(c, d):
        d.later(c, INSERT, {"key": "a"})
        d.later(c, "SELECT pg_sleep(:seconds)", {"seconds": 300})
        d.later(c, INSERT, {"key": "b"})
        d.commit(c)

    sleeps = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'"
    for _ in range(3):
        task = asyncio.create_task(quick(slow))
        while not await quick(lambda c, d: d.run(c, sleeps).scalar()):  # noqa: ASYNC110 - the server's state, no event
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await quick(keys) == []
    assert connections(postgres_url)[0] == 0


async def test_a_round_larger_than_the_socket_holds(quick):
    """Both sides write at once: whoever does not read meanwhile waits for ever."""

    def large(c, d):
        text = "x" * 3_000_000
        answers = [d.later(c, "SELECT CAST(:text AS text) AS text", {"text": text}) for _ in range(4)]
        d.send(c)
        return all(one.scalar() == text for one in answers)

    assert await quick(large)


def test_for_synchronous_callers_too(postgres_database):
    text = "x" * 3_000_000

    @direct
    def large(c, d):
        return d.run(c, "SELECT CAST(:text AS text) AS text", {"text": text}).scalar() == text

    assert postgres_database.statement_sync(large)
    with pytest.raises(DBAPIError):
        postgres_database.statement_sync(direct(lambda c, d: d.run(c, "SELECT 1 / 0")))
    assert postgres_database.statement_sync(keys) == []


async def test_without_pipelines_they_go_one_by_one(quick, monkeypatch):
    """A libpq before 14."""
    monkeypatch.setattr(pipeline, "is_supported", lambda: False)

    def several(c, d):
        first = d.later(c, INSERT, {"key": "a"})
        second = d.later(c, "SELECT current_setting('plan_cache_mode') AS plans")
        d.commit(c)
        return first.one().key, second.scalar()

    assert await quick(several) == ("a", "force_generic_plan")
    with pytest.raises(DBAPIError):
        await quick(lambda c, d: (put(c, d, "b"), put(c, d, "b")))
    assert await quick(keys) == ["a"]


async def test_no_transaction_needs_the_session_of_another(postgres_url, open_database):
    """A pooler gives each transaction another session, where nothing is prepared or set."""
    separator = "&" if "?" in postgres_url else "?"
    database = open_database(f"{postgres_url}{separator}prepare_threshold=none")

    def several(c, d):
        d.later(c, INSERT, {"key": "a"})
        d.later(c, "DELETE FROM {resource} WHERE key = :key", {"key": "a"})
        d.run(c, "SELECT 1 AS one WHERE :a = 'a'", {"a": "a"})
        d.commit(c)

    state = "SELECT (SELECT count(*) FROM pg_prepared_statements) AS prepared, current_setting('jit') AS jit"
    for _ in range(4):
        await database.transaction(direct(several))
        row = (await database.statement(direct(lambda c, d: d.run(c, state).all())))[0]
        assert tuple(row) == (0, "on")
        await database.statement(direct(lambda c, d: d.run(c, "DISCARD ALL")))


# -- the claim and the short success, cut off at each of their statements ----------------------------------------------


class Meddler:
    """Brings a fault before the n-th statement of a transaction, counted from 0 over its rounds."""

    def __init__(self, monkeypatch):
        self.statements, self.is_armed, self._at, self._fault = [], False, 0, ""
        self._watch = self.session = None
        send = pipeline.Line.send

        def meddled(line, queries):
            first, queries = len(self.statements), list(queries)
            self.statements += [query.named for query, _ in queries]
            if self.is_armed and first <= self._at < len(self.statements):
                self.is_armed, self.session = False, line.libpq.backend_pid
                if self._fault == "the session ends between rounds":
                    self.wait_for_the_end()
                else:
                    sleep = self._fault == "the caller goes"
                    own = "SELECT pg_sleep(300)" if sleep else "SELECT pg_terminate_backend(pg_backend_pid())"
                    queries.insert(self._at - first, (pipeline.Query(own, False, own.encode()), None))  # noqa: FBT003
            return send(line, queries)

        monkeypatch.setattr(pipeline.Line, "send", meddled)

    def arm(self, at, fault, watch):
        self.statements, self.is_armed, self._at, self._fault, self._watch = [], True, at, fault, watch

    def wait_for_the_end(self):
        """Of the session that the fault met. A client hears of it before its locks are free; claims pass over locks."""
        self._watch.execute("SELECT pg_terminate_backend(%s, 30000)", [self.session])


@pytest.fixture
def meddler(monkeypatch):
    return Meddler(monkeypatch)


class Work:
    """Keys with two jobs each: those a claim starts, or has started and the completer finishes."""

    def __init__(self, database, way):
        self._database, self._way = database, way
        limits = {"a/*": [Limit(1000, per=60, counts="jobs", name="m")]}
        policies = Policies(concurrency={"a/*": 1}) if way == "parking claim" else Policies(limits=limits)
        self._ask = ask(policies, per_key=1)
        put_jobs(database, *(new(f"a/{n}") for n in range(3) for _ in range(2)))
        database.transaction_sync(resources.ensure, ["a", *(f"a/{n}" for n in range(3))])
        self._running = database.transaction_sync(claim.claim, self._ask).jobs if way == "finish" else []

    async def act(self):
        if self._way != "finish":
            return {row.id for row in (await self._database.transaction(claim.claim, self._ask)).jobs}
        done = [(row.id, row.version + 1, "7" if n else None) for n, row in enumerate(self._running)]
        return await self._database.transaction(completer.write, done, [], {}, alone=True)

    def written(self):
        state = "succeeded" if self._way == "finish" else "running"
        sql = f"SELECT id FROM {{job}} WHERE state = '{state}'"
        return {row.id for row in self._database.transaction_sync(lambda c, d: d.run(c, sql, id=ID).all())}


@pytest.mark.parametrize("way", ["claim", "parking claim", "finish"])
@pytest.mark.parametrize("fault", ["the session ends", "the session ends between rounds", "the caller goes"])
async def test_cut_off_at_any_statement_nothing_is_there_and_the_next_try_does_all(
    postgres_database, postgres_url, meddler, way, fault
):
    work, at = Work(postgres_database, way), 0
    sleeps = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND query LIKE 'SELECT pg_sleep%%' AND state = 'active'"
    with psycopg.connect(postgres_url, autocommit=True) as watch:
        while True:
            meddler.arm(at, fault, watch)
            task = asyncio.create_task(work.act())
            if fault == "the caller goes":
                while not task.done() and not watch.execute(sleeps, [meddler.session]).fetchone():  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                if not meddler.is_armed:
                    task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if meddler.is_armed:
                break
            assert isinstance(result, asyncio.CancelledError if fault == "the caller goes" else DatabaseUnreachable)
            if fault == "the session ends":
                meddler.wait_for_the_end()
            assert not work.written(), f"before {meddler.statements[at]!r}"
            assert not broken(postgres_database)
            assert connections(postgres_url)[0] == 0
            at += 1
    assert at > 1
    assert len(result) == 3
    assert result == work.written()
    assert not broken(postgres_database)


async def test_a_cancel_that_the_server_ignored_is_sent_again(quick, postgres_url, monkeypatch):
    """It ignores one that comes between two messages of a round, and would sleep on."""
    sent, cancel = [], psycopg.AsyncConnection.cancel_safe

    async def lost_at_first(driver, **options):
        sent.append(driver)
        if len(sent) > 1:
            await cancel(driver, **options)

    monkeypatch.setattr(psycopg.AsyncConnection, "cancel_safe", lost_at_first)
    sleeps = "SELECT 1 FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(300)' AND wait_event = 'PgSleep'"
    with psycopg.connect(postgres_url, autocommit=True) as watch:
        task = asyncio.create_task(quick(lambda c, d: d.run(c, "SELECT pg_sleep(300)")))
        while not watch.execute(sleeps).fetchone():  # noqa: ASYNC110 - the server's state, no event
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not watch.execute(sleeps).fetchone()
    assert len(sent) == 2


async def test_an_error_names_the_statement_that_failed(quick):
    def several(c, d):
        d.later(c, INSERT, {"key": "a"})
        d.later(c, "SELECT 1 / 0")
        d.later(c, INSERT, {"key": "b"})
        d.commit(c)

    for _ in range(3):
        with pytest.raises(DBAPIError, match="by zero") as caught:
            await quick(several)
        assert caught.value.statement == "SELECT 1 / 0"
