"""A job that a newer one with its unique key replaces, or for which it is kept."""

import asyncio
import threading
from datetime import timedelta

import pytest

from resilient import DuplicateJob, InvalidInput, Item, Job, JobFilter, Resilient, handler
from resilient.core.gates.policy import Policies
from resilient.store.gates import resources, turns
from resilient.store.jobs import changes, claim
from resilient.store.jobs.dependencies import release_followers
from tests.helpers import LIMIT
from tests.interleaving import until_somebody_waits

WORDS = {"resource_key": "p/1", "unique_key": "u"}


@handler("replaced.send")
async def send(job: Job[str]) -> None:
    """Send it."""


async def test_a_job_that_is_replaced_by_one_for_later_waits_for_no_gate_any_more(database, clock):
    """Else it would begin when that gate opens, and not at the time of the newer one."""
    app = Resilient(database, handlers=[send])
    old = await app.enqueue(send, "old", delay=30, **WORDS)
    await database.transaction(lambda c, d: d.run(c, "UPDATE {job} SET waiting_for = 'p/1'"))
    new = await app.enqueue(send, "new", delay=3600, on_conflict="replace", **WORDS)
    later = clock.advance(seconds=1)
    assert await database.transaction(turns.hasten, "p/1", 10, later) == 0
    job = await app.jobs.get(old.id)
    assert (new.id, job.state, job.waiting_for) == (old.id, "scheduled", None)
    assert (job.run_at - later).total_seconds() == 3599
    await app.close()


async def test_a_job_that_is_replaced_has_lost_no_worker_yet(database, clock):
    """A third worker lost would be its end, and the newer one was run by none."""
    app = Resilient(database, handlers=[send])
    old = await app.enqueue(send, "old", **WORDS)
    await database.transaction(lambda c, d: d.run(c, "UPDATE {job} SET rescues = 2"))
    await app.enqueue(send, "new", on_conflict="replace", **WORDS)
    assert (await app.jobs.get(old.id)).rescues == 0
    await app.close()


@pytest.mark.parametrize("while_running", [False, True])
async def test_no_job_stands_for_one_of_another_account(database, while_running):
    """Else the newer payload would go through the credentials of the older one's account, or nobody would run it."""
    app = Resilient(database, handlers=[send])
    words = WORDS | {"unique_until": "finish"}
    await app.enqueue(send, "old", **words)
    if while_running:
        await database.transaction(lambda c, d: d.run(c, "UPDATE {job} SET state = 'running'"))
    words |= {"resource_key": "p/2", "on_conflict": "replace", "while_running": "once_more"}
    with pytest.raises(DuplicateJob, match=r"of p/1 holds unique_key 'u' and does nothing for p/2: name .* in the key"):
        await app.enqueue(send, "new", **words)
    assert not (await app.enqueue(send, "new", **words | {"on_conflict": "keep", "while_running": "drop"})).created
    await app.close()


async def test_a_job_that_is_about_to_be_cancelled_promises_no_further_run(database):
    """The cancel ends it, and with it what was promised: nobody would have been told."""
    words = WORDS | {"unique_until": "finish", "while_running": "once_more"}
    errors = []

    @handler("cancelled.send")
    async def cancelled(job: Job[None]) -> None:
        await app.jobs.cancel(job.id)
        try:
            await app.enqueue(cancelled, **words)
        except DuplicateJob as error:
            errors.append(str(error))
        await app.enqueue(cancelled, **WORDS | {"unique_until": "finish"})  # this asks for no run of its own
        raise asyncio.CancelledError

    app = Resilient(database, handlers=[cancelled])
    done = await app.enqueue(cancelled, **words)
    await app.worker().drain(timeout=LIMIT)
    assert (await app.jobs.get(done.id)).state == "cancelled"
    (error,) = errors
    assert error == (
        f"job {done.id} (cancelled.send) holds unique_key 'u' and is about to be cancelled, so that it cannot run once"
        " more: enqueue again when it has ended"
    )
    assert (await app.enqueue(cancelled, **words)).created
    await app.close()


def claims(c, d):
    ask = claim.Ask("w", 8, [send.kind], timedelta(minutes=1), Policies().for_key, lambda: 0.5)
    return claim.claim(c, d, ask).jobs


async def test_a_job_that_is_kept_starts_after_what_the_other_transaction_writes(postgres_database):
    """It was not enqueued, because this one is still to run: so it has to see what it was to be enqueued for."""
    app = Resilient(postgres_database, handlers=[send])
    old = await app.enqueue(send, "old", **WORDS)
    await postgres_database.transaction(resources.ensure, ["p", "p/1"])
    with postgres_database.sync_engine.begin() as c:
        assert not app.sync.enqueue(send, "new", session=c, **WORDS).created
        assert postgres_database.transaction_sync(claims) == []
    assert [job.id for job in postgres_database.transaction_sync(claims)] == [old.id]
    with postgres_database.sync_engine.begin() as c:
        assert app.sync.enqueue(send, "new", session=c, **WORDS).created
    await app.close()


async def test_a_retry_takes_unique_keys_in_the_order_of_an_enqueue(postgres_database):
    """Else the two of them wait for each other."""
    app = Resilient(postgres_database, handlers=[send])
    ids = [(await app.enqueue(send, "old", **WORDS | {"unique_key": key})).id for key in ("b", "a")]
    over = "UPDATE {job} SET state = 'dead', finished_at = updated_at, unique_lock = NULL"
    await postgres_database.transaction(lambda c, d: d.run(c, over) and None)
    sweep = changes.Sweep(changes.Retry(), JobFilter(ids=tuple(ids)))
    thread = threading.Thread(target=postgres_database.transaction_sync, args=(sweep.step,))
    with postgres_database.sync_engine.begin() as c:
        app.sync.enqueue(send, "new", session=c, **WORDS | {"unique_key": "a"})
        thread.start()
        until_somebody_waits(postgres_database, thread)
        app.sync.enqueue(send, "new", session=c, **WORDS | {"unique_key": "b"})
    thread.join()
    assert sweep.tally == {"retried": 0, "duplicates": 2}
    await app.close()


def test_two_large_enqueues_take_ordering_keys_in_one_order(postgres_database, monkeypatch):
    """Written in two batches, those of the second one might come before those of the first."""
    monkeypatch.setattr("resilient.engine.jobs.queue.BATCH", 1)
    app = Resilient(postgres_database, handlers=[send])
    items = [Item("new", ordering_key=key) for key in ("b", "a")]
    done = []
    thread = threading.Thread(
        target=lambda: done.extend(app.sync.enqueue_many(send, items, resource_key="p/1"))
    )  # fmt: skip
    with postgres_database.sync_engine.begin() as c:
        app.sync.enqueue(send, "old", session=c, resource_key="p/1", ordering_key="a")
        thread.start()
        until_somebody_waits(postgres_database, thread)
        app.sync.enqueue(send, "old", session=c, resource_key="p/1", ordering_key="b")
    thread.join()
    assert [one.created for one in done] == [True, True]


async def test_a_newer_one_that_waits_for_others_or_in_a_lane_replaces_none(database):
    """It would run at once, before what it was to wait for."""
    app = Resilient(database, handlers=[send])
    before = await app.enqueue(send, "before", resource_key="p/1")
    old = await app.enqueue(send, "old", **WORDS)
    for words, what in (({"after": before}, "after="), ({"ordering_key": "line"}, "ordering_key='line' and not None")):
        with pytest.raises(
            DuplicateJob, match=rf"job {old.id} .* cannot be given {what}: what it waits for is said once"
        ):
            await app.enqueue(send, "new", on_conflict="replace", **WORDS, **words)
    assert (await app.jobs.get(old.id)).payload == "old"
    await app.close()


async def test_the_newer_one_says_how_often_and_until_when_it_is_unique(database):
    app = Resilient(database, handlers=[send])
    old = await app.enqueue(send, "old", **WORDS)
    await app.enqueue(send, "new", on_conflict="replace", max_attempts=3, unique_until="finish", **WORDS)
    job = await app.jobs.get(old.id)
    assert (job.payload, job.max_attempts) == ("new", 3)
    await database.transaction(resources.ensure, ["p", "p/1"])
    assert [one.id for one in await database.transaction(claims)] == [old.id]
    assert not (await app.enqueue(send, "newer", **WORDS)).created
    await app.close()


async def test_the_newer_one_says_whether_its_death_holds_up_its_lane(database):
    app = Resilient(database, handlers=[send])
    lane = {"ordering_key": "line"}
    old = await app.enqueue(send, "old", **WORDS, **lane)
    behind = await app.enqueue(send, "behind", resource_key="p/1", **lane)
    await app.enqueue(send, "new", on_conflict="replace", ordering_policy="skip", **WORDS, **lane)
    dies = "UPDATE {job} SET state = 'dead', finished_at = run_at WHERE id = :id"
    await database.transaction(lambda c, d: d.run(c, dies, {"id": d.id(old.id)}) and None)
    await database.transaction(lambda c, d: release_followers(c, d, [], [old.id], d.now(c)))
    assert (await app.jobs.get(behind.id)).state == "ready"
    await app.close()


@pytest.mark.parametrize("on_conflict", ["raise", "replace"])
async def test_of_many_that_are_refused_none_is_written(database, on_conflict):
    """Their caller catches the error, and commits."""
    app = Resilient(database, handlers=[send])
    await app.enqueue(send, "old", resource_key="p/1", unique_key="z")
    items = [Item("a"), Item("b", unique_key="y"), Item("c", unique_key="z")]
    with database.sync_engine.begin() as c:
        with pytest.raises(DuplicateJob):
            app.enqueue_many_sync(send, items, resource_key="p/2", on_conflict=on_conflict, session=c)
        app.enqueue_sync(send, "beside it", resource_key="p/1", session=c)
    assert sorted(job.payload for job in await app.jobs.list()) == ["beside it", "old"]
    await app.close()


@pytest.mark.parametrize(
    ("name", "word"), [("on_conflict", "replace"), ("on_conflict", "raise"), ("while_running", "once_more")]
)
async def test_what_becomes_of_a_conflict_is_refused_where_there_can_be_none(database, name, word):
    """Without a unique key it was ignored: what was meant to replace a job ran beside it."""
    app, option = Resilient(database, handlers=[send]), {name: word}
    with pytest.raises(InvalidInput, match=f"{name}=.* give unique_key="):
        await app.enqueue(send, "a", resource_key="p/1", **option)
    with pytest.raises(InvalidInput, match=f"{name}=.* give unique_key="):
        await app.enqueue_many(send, [Item("a"), Item("b", priority=1)], resource_key="p/1", **option)
    assert not await app.jobs.list()
    mixed = [Item("a"), Item("b", priority=1), Item("c", unique_key="z")]
    await app.enqueue_many(send, mixed, resource_key="p/1", **option)
    assert sorted(job.payload for job in await app.jobs.list()) == ["a", "b", "c"]
    await app.close()


async def test_a_rollback_takes_what_was_written_within_a_savepoint(database):
    """On SQLite the driver begins a transaction with the first write: a savepoint before it would commit."""
    app = Resilient(database, handlers=[send])
    with database.sync_engine.connect() as c:
        transaction = c.begin()
        app.enqueue_many_sync(send, [Item("a"), Item("b", unique_key="y")], resource_key="p/2", session=c)
        transaction.rollback()
    assert not await app.jobs.list()
    await app.close()
