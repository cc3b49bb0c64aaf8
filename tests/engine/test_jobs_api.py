"""`app.jobs` and `app.sync.jobs`: look and change, in transactions of their own and in the caller's."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlmodel import Session as SqlModelSession

from resilient import (
    BadPayload,
    Cancelled,
    Deleted,
    Discarded,
    Edited,
    InvalidInput,
    Job,
    JobFilter,
    JobNotFound,
    JobState,
    Kind,
    NaiveDatetime,
    PayloadTooLarge,
    Resilient,
    Retried,
    UnknownKind,
    handler,
)
from resilient.store.gates import turns
from resilient.store.jobs.changes import BATCH
from resilient.store.jobs.filters import JOB


class Mail(BaseModel):
    to: str


@handler("mail.send", version=3)
async def send(job: Job[Mail]) -> None: ...


SYNC = Kind("issues.sync")


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[send], kinds=[SYNC], max_payload=1000, upgrade=False)
    yield app
    await app.close()


@pytest.fixture
def mark(database):
    """Write columns over jobs, as an engine that ran them would have."""

    def write(*ids, **columns):
        if columns.get("state") in {"dead", "succeeded", "cancelled"}:
            columns["finished_at"] = datetime.now(UTC)
        database.transaction_sync(lambda c, d: d.execute(c, sa.update(JOB).where(JOB.c.id.in_(ids)).values(**columns)))

    return write


async def some(app, count=1, kind=send, key="github/a", **options):
    payload = {"to": "a@b.c"} if kind is send else None
    done = await app.enqueue_many(kind, [payload] * count, resource_key=key, **options)
    return [e.id for e in done]


# -- looking ---------------------------------------------------------------------------------------------------------


async def test_get_list_count_attempts(app):
    (first,) = await some(app, tags={"user": "7"})
    second, third = await some(app, 2, key="github/b")
    assert (await app.jobs.get(str(first))).payload == {"to": "a@b.c"}
    assert [j.id for j in await app.jobs.list()] == [third, second, first]
    assert [j.id for j in await app.jobs.list(limit=1, after=third)] == [second]
    assert [j.id for j in await app.jobs.list(tags={"user": "7"}, order="oldest")] == [first]
    assert await app.jobs.count(resource="github/*") == 3
    assert str(await app.jobs.count(limit=2)) == "2+"
    assert await app.jobs.attempts(first) == []


async def test_an_unknown_id_and_a_wrong_one(app):
    for call in (
        app.jobs.get,
        app.jobs.why,
        app.jobs.cancel,
        app.jobs.retry,
        app.jobs.discard,
        app.jobs.delete,
    ):
        with pytest.raises(JobNotFound, match="was never committed, or it was pruned"):
            await call(uuid4())
        with pytest.raises(InvalidInput, match="'7' is not a job id"):
            await call("7")
    with pytest.raises(JobNotFound):
        await app.jobs.edit(uuid4(), payload={"to": "x"})
    assert await app.jobs.cancel([uuid4()]) == Cancelled()


# -- changing --------------------------------------------------------------------------------------------------------


async def test_one_job_through_its_changes(app, mark):
    (job,) = await some(app)
    assert await app.jobs.cancel(job) == Cancelled(cancelled=1)
    assert await app.jobs.cancel(job) == Cancelled(too_late=1)
    assert await app.jobs.retry(job) == Retried(retried=1)
    assert await app.jobs.discard(job) == Discarded(not_dead=1)
    mark(job, state="running")
    assert await app.jobs.cancel(job) == Cancelled(requested=1)
    assert await app.jobs.edit(job, priority=3) == Edited(running=1)
    mark(job, state="dead")
    assert await app.jobs.edit(job, priority=3) == Edited(edited=1)
    assert await app.jobs.discard(job) == Discarded(discarded=1)
    assert await app.jobs.delete(job, dry_run=True) == Deleted(deleted=1)
    assert await app.jobs.delete(job) == Deleted(deleted=1)
    with pytest.raises(JobNotFound):
        await app.jobs.get(job)


async def test_many_by_criteria_a_filter_and_ids(app, mark):
    ids = await some(app, BATCH + 3)
    (other,) = await some(app, key="gitlab/a")
    assert await app.jobs.cancel(kind="mail.send", resource="github/*", dry_run=True) == Cancelled(cancelled=BATCH + 3)
    assert await app.jobs.cancel(JobFilter.of({"resource": "github/*"}), limit=2) == Cancelled(cancelled=2)
    assert await app.jobs.cancel({"resource": "github/*"}) == Cancelled(cancelled=BATCH + 1)
    assert await app.jobs.retry(ids, rate="10/s") == Retried(retried=BATCH + 3)
    states = [j.state for j in await app.jobs.list(resource="github/a", limit=1000)]
    assert (states.count(JobState.READY), states.count(JobState.SCHEDULED)) == (1, BATCH + 2)
    assert (await app.jobs.get(other)).state == JobState.READY


async def test_everything_must_be_said(app):
    await some(app, 2)
    for call in (app.jobs.cancel, app.jobs.retry, app.jobs.discard, app.jobs.delete):
        with pytest.raises(
            InvalidInput, match="this would mean every job: give an id or a filter, or say everything=True"
        ):
            await call()
    for nothing in ({}, JobFilter(), None):
        with pytest.raises(InvalidInput, match="this would mean every job"):
            await app.jobs.edit(nothing, priority=1)
    with pytest.raises(InvalidInput, match="give job ids or a filter, not both"):
        await app.jobs.cancel([uuid4()], kind="mail.send")
    with pytest.raises(InvalidInput, match="no filter 'colour'"):
        await app.jobs.cancel(colour="red")
    assert await app.jobs.cancel(everything=True) == Cancelled(cancelled=2)


@pytest.mark.parametrize(("rate", "seconds"), [(10, 0.1), ("10/s", 0.1), ("30/min", 2.0), (None, None)])
async def test_a_rate_is_a_distance(rate, seconds):
    from resilient.engine.jobs.api import spacing_of

    assert spacing_of(rate) == (None if seconds is None else timedelta(seconds=seconds))


@pytest.mark.parametrize("rate", [0, -1, "fast", "0/s"])
async def test_a_rate_that_cannot_be_meant(app, rate):
    with pytest.raises(InvalidInput):
        await app.jobs.retry(state="dead", rate=rate)


# -- edit ------------------------------------------------------------------------------------------------------------


async def test_a_new_payload_is_checked_like_an_enqueued_one(app):
    (job,) = await some(app)
    assert await app.jobs.edit(job, payload=Mail(to="new")) == Edited(edited=1)
    assert await app.jobs.edit({"kind": "mail.send"}, payload={"to": "newer"}) == Edited(edited=1)
    after = await app.jobs.get(job)
    assert (after.payload, after.payload_version) == ({"to": "newer"}, 3)
    with pytest.raises(BadPayload, match="to: Field required"):
        await app.jobs.edit(job, payload={"from": 1})
    with pytest.raises(PayloadTooLarge):
        await app.jobs.edit(job, payload={"to": "x" * 2000})
    with pytest.raises(InvalidInput, match="a payload fits one kind of job"):
        await app.jobs.edit({"resource": "github/*"}, payload={"to": "x"})
    with pytest.raises(InvalidInput, match="a payload fits one kind of job"):
        await app.jobs.edit([job, *await some(app, kind=SYNC)], payload={"to": "x"})
    with pytest.raises(UnknownKind, match="no handler is declared for kind 'who'"):
        await app.jobs.edit({"kind": "who"}, payload={"to": "x"})


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({}, InvalidInput, "nothing to edit"),
        ({"priority": 101}, InvalidInput, "priority must be"),
        ({"priority": None}, InvalidInput, "priority cannot be None"),
        ({"run_at": None}, InvalidInput, "run_at cannot be None"),
        ({"max_attempts": 0}, InvalidInput, "max_attempts must be at least 1"),
        ({"run_at": datetime(2030, 1, 1)}, NaiveDatetime, "run_at"),  # noqa: DTZ001
        ({"expires_at": datetime(2030, 1, 1)}, NaiveDatetime, "expires_at"),  # noqa: DTZ001
        ({"tags": {"n": 1}}, InvalidInput, "tag 'n' must be text"),
        ({"delay": 5, "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, InvalidInput, "delay or run_at"),
        ({"delay": -5}, InvalidInput, "delay must be"),
    ],
)
async def test_wrong_values_change_nothing(app, values, error, says):
    (job,) = await some(app)
    before = await app.jobs.get(job)
    with pytest.raises(error, match=says):
        await app.jobs.edit(job, **values)
    assert await app.jobs.get(job) == before


async def test_none_is_a_value_where_it_means_something(app):
    (job,) = await some(app, tags={"a": "b"}, max_attempts=3, expires_in=60)
    await app.jobs.edit(job, tags=None, max_attempts=None, expires_at=None)
    after = await app.jobs.get(job)
    assert (after.tags, after.max_attempts, after.expires_at) == (None, None, None)


async def test_delay_counts_from_the_database_s_now(clock, app):
    (job,) = await some(app)
    await app.jobs.edit(job, delay=timedelta(minutes=5))
    after = await app.jobs.get(job)
    assert (after.state, after.run_at) == (JobState.SCHEDULED, clock.now() + timedelta(minutes=5))


async def test_a_payload_that_may_have_been_sent(app, mark):
    ran, fresh = await some(app, 2)
    mark(ran, executions=1)
    with pytest.raises(InvalidInput, match=rf"job {ran} has run before.*say new_operation=True"):
        await app.jobs.edit(ran, payload={"to": "x"})
    assert await app.jobs.edit([ran, fresh], payload={"to": "x"}) == Edited(edited=1, sent=1)
    assert await app.jobs.edit(ran, payload={"to": "x"}, new_operation=True) == Edited(edited=1)


# -- the caller's transaction ----------------------------------------------------------------------------------------


def sync_sessions(engine):
    yield Session(engine)
    yield SqlModelSession(engine)
    yield scoped_session(sessionmaker(engine))


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_in_a_sync_session(app, database, number):
    keep, lose = await some(app, 2)
    session = list(sync_sessions(database.sync_engine))[number]
    with contextlib.closing(session):
        assert app.sync.jobs.cancel(lose, session=session) == Cancelled(cancelled=1)
        assert app.sync.jobs.get(lose, session=session).state == JobState.CANCELLED
        session.rollback()
        assert app.sync.jobs.cancel(keep, session=session) == Cancelled(cancelled=1)
        session.commit()
    assert [j.id for j in await app.jobs.list(state="cancelled")] == [keep]


async def test_in_a_connection(app, database):
    (job,) = await some(app)
    with database.sync_engine.connect() as c:
        with pytest.raises(InvalidInput, match="not in a transaction"):
            app.sync.jobs.cancel(job, session=c)
        with c.begin() as t:
            assert app.sync.jobs.edit(job, priority=9, session=c) == Edited(edited=1)
            assert app.sync.jobs.count(kind="mail.send", session=c) == 1
            t.rollback()
    assert (await app.jobs.get(job)).priority == 0


@pytest.fixture
async def async_engine(database_url):
    url = sa.make_url(database_url)
    driver = "sqlite+aiosqlite" if url.get_backend_name() == "sqlite" else "postgresql+psycopg"
    engine = create_async_engine(url.set(drivername=driver))
    yield engine
    await engine.dispose()


async def test_in_an_async_session_and_connection(app, async_engine):
    keep, lose = await some(app, 2)
    async with AsyncSession(async_engine) as session:
        assert await app.jobs.cancel(lose, session=session) == Cancelled(cancelled=1)
        await session.rollback()
        assert await app.jobs.cancel(keep, session=session) == Cancelled(cancelled=1)
        assert (await app.jobs.list(state="cancelled", session=session))[0].id == keep
        await session.commit()
    async with async_engine.connect() as c, c.begin() as t:
        assert await app.jobs.cancel(lose, session=c) == Cancelled(cancelled=1)
        await t.rollback()
    assert [j.id for j in await app.jobs.list(state="cancelled")] == [keep]
    with pytest.raises(InvalidInput, match="take a Session, not an AsyncSession"):
        app.sync.jobs.cancel(lose, session=AsyncSession(async_engine))


async def test_what_is_no_session_is_named(app):
    with pytest.raises(InvalidInput, match=r"session= takes a Session, .* not str"):
        await app.jobs.list(session="main")


async def test_workers_are_woken_only_by_what_was_committed(app, database, monkeypatch):
    pokes = []
    monkeypatch.setattr(app.ground.waker, "poke", lambda: pokes.append(1))
    (job,) = await some(app)
    pokes.clear()
    await app.jobs.list()
    await app.jobs.cancel(job, dry_run=True)
    assert pokes == []
    await app.jobs.cancel(job)
    assert pokes == [1]
    with Session(database.sync_engine) as session:
        app.sync.jobs.retry(job, session=session)
        session.rollback()
        assert pokes == [1]
        app.sync.jobs.retry(job, session=session)
        session.commit()
    assert pokes == [1, 1]


# -- the synchronous face --------------------------------------------------------------------------------------------


def test_every_method_has_a_synchronous_twin(app):
    for api in (app.jobs, app.resources):
        public = {name for name in dir(api) if not name.startswith("_")} - {"sync"}
        assert public == {name for name in dir(api.sync) if not name.startswith("_")}


async def test_the_synchronous_face_does_the_same(app):
    jobs = app.sync.jobs
    first, second = await some(app, 2)
    assert jobs.get(first).id == first
    assert [j.id for j in jobs.list(limit=1)] == [second]
    assert jobs.count() == 2
    assert jobs.cancel(first) == Cancelled(cancelled=1)
    assert jobs.retry(first, rate=1) == Retried(retried=1)
    assert jobs.edit(first, priority=1) == Edited(edited=1)
    assert jobs.discard(first) == Discarded(not_dead=1)
    assert jobs.delete(first) == Deleted(not_finished=1)
    assert jobs.attempts(first) == []
    assert jobs.why(first).state == "ready"


# -- why -------------------------------------------------------------------------------------------------------------


async def test_why_a_ready_job_waits(app, database):
    first, second = await some(app, 2)
    await app.resources.pause("github", reason="incident")
    why = await app.jobs.why(second)
    assert [r.code for r in why.reasons] == ["ready", "pause", "line", "no_worker"]
    assert "1 job is ahead of it in the line of github/a; 2 jobs wait there." in why.text
    assert why.reasons[1].text.endswith("2 jobs wait there.")
    assert (why.waiting, why.until) == (2, None)
    assert (await app.jobs.why(first)).reasons[2].code == "first"
    database.transaction_sync(turns.take, turns.Selection(10))
    assert "no_turn" in [r.code for r in (await app.jobs.why(first)).reasons]


async def test_the_line_goes_by_priority_time_and_id(app):
    slow, second = await some(app, 2)
    (fast,) = await some(app, priority=5)
    lines = {
        job: [r.text for r in (await app.jobs.why(job)).reasons if r.code in ("line", "first")]
        for job in (fast, slow, second)
    }
    assert [text[0].split(" ")[0] for text in lines.values()] == ["It", "1", "2"]


async def test_why_knows_what_this_program_cannot_run(app):
    (job,) = await some(app, kind=SYNC)
    from resilient.store.inspect import workers

    def beat(c, d):
        workers.beat(c, d, workers.Beat("w1", "h", 1, ["issues.sync"], 5, 0, "1", stopping=False), d.now(c))

    app.database.transaction_sync(beat)
    assert [r.code for r in (await app.jobs.why(job)).reasons] == ["ready", "first", "not_declared"]
