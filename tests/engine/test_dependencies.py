"""Jobs that wait for others: fan-out, fan-in, policies, and every race of an end with a beginning."""

from __future__ import annotations

import threading
from uuid import UUID

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from resilient import InvalidInput, Item, Job, Permanent, Resilient, handler
from resilient.store.jobs import changes, dependencies, finishing
from tests.helpers import LIMIT, settle
from tests.interleaving import until_somebody_waits

RAN: list[object] = []


@handler("step")
async def step(job: Job[object]) -> None:
    RAN.append(job.payload)
    if job.payload == "dies":
        raise Permanent("no")


@pytest.fixture
async def app(database):
    RAN.clear()
    app = Resilient(database, handlers=[step], upgrade=False)
    yield app
    await app.close()


def put(app, payload, **options):
    return app.sync.enqueue(step, payload, resource_key="p/1", **options).id


def states(app, *ids):
    return " ".join(str(app.sync.jobs.get(id_).state) for id_ in ids)


def edges(app):
    return app.database.transaction_sync(lambda c, d: d.run(c, "SELECT count(*) FROM {dependency}").scalar())


async def drain(app):
    """Run everything that can run; the payloads that ran."""
    await settle(app)
    return list(RAN)


class TestWaiting:
    async def test_a_chain(self, app):
        a = put(app, 1)
        b = put(app, 2, after=a)
        c = put(app, 3, after=[b])
        assert states(app, a, b, c) == "ready blocked blocked"
        assert await drain(app) == [1, 2, 3]
        assert edges(app) == 0

    async def test_fan_out_and_fan_in(self, app):
        first = put(app, "first")
        many = await app.enqueue_many(step, range(20), resource_key="p/1", after=[first])
        put(app, "last", after=many)
        ran = await drain(app)
        assert (ran[0], ran[-1], sorted(ran[1:-1])) == ("first", "last", list(range(20)))

    async def test_on_one_that_is_over(self, app):
        a = put(app, 1)
        await drain(app)
        b = put(app, 2, after=a)
        assert states(app, b) == "ready"
        assert await drain(app) == [1, 2]

    async def test_with_a_time(self, app):
        a = put(app, 1)
        b = put(app, 2, after=a, delay=3600)
        await drain(app)
        assert states(app, a, b) == "succeeded scheduled"

    async def test_in_one_transaction_with_what_it_waits_for(self, app):
        with Session(app.database.sync_engine) as session:
            a = app.enqueue_sync(step, 1, resource_key="p/1", session=session)
            b = app.enqueue_sync(step, 2, resource_key="p/1", after=a, session=session)
            app.enqueue_sync(step, 3, resource_key="p/1", after=[b], session=session)
            session.commit()
        assert await drain(app) == [1, 2, 3]

    async def test_after_one_whose_unique_key_is_taken(self, app):
        """The other job, which holds the key, is the one that it waits for."""
        held = put(app, "held", unique_key="u", delay=3600)
        with Session(app.database.sync_engine) as session:
            again = app.enqueue_sync(step, "again", resource_key="p/1", unique_key="u", session=session)
            child = app.enqueue_sync(step, "child", resource_key="p/1", after=[again, held], session=session)
            session.commit()
        assert states(app, held, child.id) == "scheduled blocked"
        app.sync.jobs.edit(held, delay=0)
        assert await drain(app) == ["held", "child"]

    async def test_on_a_connection_staging_looks_at_it(self, app):
        a = put(app, 1)
        with app.database.sync_engine.begin() as c:
            app.enqueue_sync(step, 2, resource_key="p/1", after=a, session=c)
        assert await drain(app) == [1, 2]

    async def test_in_a_lane(self, app):
        gate = put(app, "gate", delay=3600)
        head = put(app, 1, ordering_key="a", after=gate)
        behind = put(app, 2, ordering_key="a")
        assert states(app, head, behind) == "blocked blocked"
        app.sync.jobs.edit(gate, delay=0)
        assert await drain(app) == ["gate", 1, 2]

    async def test_behind_others_in_a_lane(self, app):
        gate = put(app, "gate")
        put(app, 1, ordering_key="a", delay=3600)
        behind = put(app, 2, ordering_key="a", after=gate)
        await drain(app)
        assert (states(app, behind), app.sync.jobs.get(behind).waits) == ("blocked", 1)
        app.sync.jobs.cancel(kind="step", state="scheduled")
        assert await drain(app) == ["gate", 2]

    async def test_items_may_wait_for_different_ones(self, app):
        a, b = put(app, "a"), put(app, "b", delay=3600)
        done = await app.enqueue_many(step, [Item(1, after=[a]), Item(2, after=[a, b])], resource_key="p/1")
        await drain(app)
        assert states(app, done[0].id, done[1].id) == "succeeded blocked"


class TestEndsOtherwise:
    @pytest.mark.parametrize(("on_dead", "state"), [("cancel", "cancelled"), ("wait", "blocked"), ("run", "succeeded")])
    async def test_a_blocker_dies(self, app, on_dead, state):
        a = put(app, "dies")
        b = put(app, 2, after=a, on_dead=on_dead)
        await drain(app)
        assert states(app, a, b) == f"dead {state}"

    @pytest.mark.parametrize(("on_dead", "state"), [("cancel", "cancelled"), ("wait", "blocked"), ("run", "succeeded")])
    async def test_a_blocker_is_cancelled(self, app, on_dead, state):
        a = put(app, 1, delay=3600)
        b = put(app, 2, after=a, on_dead=on_dead)
        app.sync.jobs.cancel(a)
        await drain(app)
        assert states(app, a, b) == f"cancelled {state}"

    @pytest.mark.parametrize(("on_dead", "state"), [("cancel", "cancelled"), ("wait", "blocked"), ("run", "succeeded")])
    async def test_a_blocker_was_dead_before(self, app, on_dead, state):
        a = put(app, "dies")
        await drain(app)
        b = put(app, 2, after=a, on_dead=on_dead)
        await drain(app)
        assert states(app, a, b) == f"dead {state}"

    @pytest.mark.parametrize(("on_dead", "state"), [("cancel", "cancelled"), ("wait", "cancelled"), ("run", "ready")])
    async def test_a_blocker_that_never_was(self, app, on_dead, state):
        missing = "0195f3a2-7c1e-7d3a-9b0e-2f6f3c1a8e55"
        b = put(app, 2, after=missing, on_dead=on_dead)
        assert states(app, b) == state
        if state == "cancelled":
            assert app.sync.jobs.get(b).last_error.startswith(f"job {missing}, for which it waited, does not exist")

    async def test_a_dead_blocker_is_deleted(self, app):
        a = put(app, "dies")
        b = put(app, 2, after=[a, put(app, 1)], on_dead="wait")
        c = put(app, 3, after=a, on_dead="wait")
        await drain(app)
        assert states(app, a, b, c) == "dead blocked blocked"
        app.sync.jobs.delete(a)
        assert states(app, b, c) == "cancelled cancelled"

    async def test_the_reason_is_told(self, app):
        a = put(app, "dies")
        b = put(app, 2, after=a)
        await drain(app)
        assert app.sync.jobs.get(b).last_error == f"job {a} (step), for which it waited, is dead"
        assert app.sync.jobs.get(b).last_error_code == "blocker_dead"

    async def test_a_whole_chain_is_cancelled(self, app):
        a = put(app, "dies")
        b = put(app, 2, after=a)
        c = put(app, 3, after=b, ordering_key="x")
        d = put(app, 4, ordering_key="x")
        e = put(app, 5, after=c, on_dead="run")
        await drain(app)
        assert states(app, a, b, c, d, e) == "dead cancelled cancelled succeeded succeeded"
        assert edges(app) == 2  # what the two that were cancelled waited for

    async def test_a_whole_chain_is_retried_in_its_order(self, app):
        """Not side by side; and once all is done, nothing is left of what was waited for."""
        a = put(app, "dies")
        b = put(app, 2, after=a)
        c = put(app, 3, after=b, ordering_key="x")
        await drain(app)
        app.sync.jobs.edit(a, payload="better", new_operation=True)
        assert app.sync.jobs.retry([c, b, a]).retried == 3
        assert states(app, a, b, c) == "ready blocked blocked"
        assert await drain(app) == ["dies", "better", 2, 3]
        assert edges(app) == 0

    async def test_what_died_is_not_waited_for_by_one_that_is_retried_alone(self, app):
        a = put(app, "dies")
        b = put(app, 2, after=a)
        await drain(app)
        app.sync.jobs.retry(b)
        assert await drain(app) == ["dies", 2]
        assert (states(app, a, b), edges(app)) == ("dead succeeded", 0)

    async def test_one_of_two_blockers_is_done_before_the_retry(self, app):
        a, b = put(app, 1), put(app, 2, delay=3600)
        c = put(app, 3, after=[a, b])
        app.sync.jobs.cancel(c)
        assert await drain(app) == [1]
        assert edges(app) == 1
        app.sync.jobs.retry(c)
        app.sync.jobs.edit(b, delay=0)
        assert await drain(app) == [1, 2, 3]
        assert edges(app) == 0

    async def test_a_blocker_that_is_deleted_takes_the_edges_of_ended_jobs_along(self, app):
        a = put(app, "dies")
        b = put(app, 2, after=a)
        await drain(app)
        app.sync.jobs.delete(a)
        assert (states(app, b), edges(app)) == ("cancelled", 0)

    async def test_whoever_is_cancelled_over_a_deleted_blocker_is_none_itself(self, app):
        """It is there, keeps what else it waits for, and its followers read what became of it."""
        a, other = put(app, "dies"), put(app, 1, delay=3600)
        b = put(app, 2, after=[a, other], on_dead="wait")
        c = put(app, 3, after=b)
        d = put(app, 4, after=b, on_dead="wait")
        await drain(app)
        app.sync.jobs.delete(a)
        assert states(app, b, c, d) == "cancelled cancelled blocked"
        jobs = [app.sync.jobs.get(id_) for id_ in (b, c)]
        assert [job.last_error_code for job in jobs] == ["blocker_gone", "blocker_cancelled"]
        app.sync.jobs.retry(b)
        assert await drain(app) == ["dies"]
        assert states(app, b, d) == "blocked blocked"
        app.sync.jobs.edit(other, delay=0)
        assert await drain(app) == ["dies", 1, 2, 4]

    async def test_waiting_jobs_go_on_once_it_is_retried(self, app):
        a = put(app, "dies")
        b = put(app, 2, after=a, on_dead="wait")
        await drain(app)
        app.sync.jobs.edit(a, payload="better", new_operation=True)
        app.sync.jobs.retry(a)
        assert await drain(app) == ["dies", "better", 2]
        assert states(app, b) == "succeeded"

    async def test_finish_replay_finish(self, app):
        a = put(app, 1)
        put(app, 2, after=a)
        await drain(app)
        app.sync.jobs.retry(a)
        assert await drain(app) == [1, 2, 1]

    async def test_a_waiting_job_is_cancelled_itself(self, app):
        a = put(app, 1, delay=3600)
        b = put(app, 2, after=a)
        c = put(app, 3, after=b)
        app.sync.jobs.cancel(b)
        assert (states(app, b, c), edges(app)) == ("cancelled cancelled", 2)
        app.sync.jobs.retry(b)
        assert await drain(app) == []
        assert states(app, a, b, c) == "scheduled blocked cancelled"
        app.sync.jobs.edit(a, delay=0)
        assert await drain(app) == [1, 2]

    async def test_a_waiting_job_expires(self, database, clock):
        app = Resilient(database, handlers=[step], upgrade=False)
        RAN.clear()
        a = put(app, 1, delay=36000)
        b = put(app, 2, after=a, expires_at=clock.now() + (clock.advance(1) - clock.now()))
        clock.advance(hours=1)
        await drain(app)
        assert (states(app, a, b), edges(app)) == ("scheduled dead", 1)
        app.sync.jobs.retry(b)
        await drain(app)
        assert states(app, a, b) == "scheduled blocked"
        await app.close()

    async def test_a_dead_blocker_is_not_pruned_while_somebody_waits(self, database, clock):
        app = Resilient(database, handlers=[step], upgrade=False)
        RAN.clear()
        a, alone = put(app, "dies"), put(app, "dies")
        b = put(app, 2, after=a, on_dead="wait")
        await drain(app)
        clock.advance(days=400)
        assert (await app.prune(older_than="1d")).dead == 1
        assert states(app, a, b) == "dead blocked"
        app.sync.jobs.cancel(b)  # it waits no more, though it would again if it were retried
        assert (await app.prune(older_than="1d")).dead == 1
        assert (states(app, b), edges(app)) == ("cancelled", 0)
        assert app.sync.jobs.count(ids=[alone]) == 0
        await app.close()


class TestRefused:
    async def test_no_id(self, app):
        with pytest.raises(InvalidInput, match="'x' is not a job id"):
            await app.enqueue(step, 1, resource_key="p/1", after=["x"])

    async def test_an_unknown_policy(self, app):
        with pytest.raises(InvalidInput, match='"cancel", "wait" or "run", not \'ignore\''):
            await app.enqueue(step, 1, resource_key="p/1", on_dead="ignore")

    async def test_too_many(self, app):
        ids = [f"0195f3a2-7c1e-7d3a-9b0e-{n:012x}" for n in range(1_001)]
        with pytest.raises(InvalidInput, match="at most 1,000 others, not 1,001"):
            await app.enqueue(step, 1, resource_key="p/1", after=ids)


# -- two connections ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def pg(postgres_url, open_database):
    RAN.clear()
    app = Resilient(open_database(postgres_url), handlers=[step], upgrade=False)
    yield app
    await app.close()


class Connected:
    """A transaction of somebody else, opened and ended by hand."""

    def __init__(self, app):
        self.c, self.d = app.database.sync_engine.connect(), app.database.dialect
        self.begun = self.c.begin()

    def start(self, *ids):
        """As a claim leaves them: running, with the version one higher."""
        for id_ in ids:
            self.d.run(
                self.c,
                "UPDATE {job} SET state = 'running', version = version + 1, locked_by = 'w', lease_until = now()"
                " WHERE id = :id",
                {"id": self.d.id(id_)},
            )

    def succeed(self, *ids):
        done = finishing.succeed_if_held(self.c, self.d, [(i, 2, None) for i in ids], self.d.now(self.c))
        assert done == set(ids)

    def commit(self):
        self.begun.commit()
        self.c.close()

    def rollback(self):
        self.begun.rollback()
        self.c.close()


def running(app, *ids):
    one = Connected(app)
    one.start(*ids)
    one.commit()


def in_thread(fn, *args):
    thread = threading.Thread(target=fn, args=args, daemon=True)
    thread.start()
    return thread


class TestRaces:
    def test_two_blockers_finish_in_overlapping_transactions(self, pg):
        a, b = put(pg, 1), put(pg, 2)
        child = put(pg, 3, after=[a, b])
        running(pg, a, b)
        one, two = Connected(pg), Connected(pg)
        one.succeed(a)
        thread = in_thread(lambda: (two.succeed(b), two.commit()))
        until_somebody_waits(pg.database, thread)
        assert states(pg, child) == "blocked"
        one.commit()
        thread.join(LIMIT)
        assert (states(pg, child), edges(pg)) == ("ready", 0)
        assert pg.sync.jobs.get(child).waits == 0

    def test_a_blockers_completion_is_rolled_back(self, pg):
        a = put(pg, 1)
        child = put(pg, 2, after=a)
        running(pg, a)
        one = Connected(pg)
        one.succeed(a)
        one.rollback()
        assert (states(pg, a, child), edges(pg)) == ("running blocked", 1)
        one = Connected(pg)
        one.succeed(a)
        one.commit()
        assert states(pg, a, child) == "succeeded ready"

    def test_one_of_two_completions_is_rolled_back_while_the_other_waits_for_it(self, pg):
        a, b = put(pg, 1), put(pg, 2)
        child = put(pg, 3, after=[a, b])
        running(pg, a, b)
        one, two = Connected(pg), Connected(pg)
        one.succeed(a)
        thread = in_thread(lambda: (two.succeed(b), two.commit()))
        until_somebody_waits(pg.database, thread)
        one.rollback()
        thread.join(LIMIT)
        assert (states(pg, child), pg.sync.jobs.get(child).waits) == ("blocked", 1)

    @pytest.mark.parametrize("finished", [True, False])
    def test_a_child_is_enqueued_while_its_blocker_finishes(self, pg, finished):
        """The finisher holds the blocker's row: nobody waits, staging looks at it later."""
        a = put(pg, 1)
        running(pg, a)
        one = Connected(pg)
        one.succeed(a)
        child = put(pg, 2, after=a)
        assert pg.database.transaction_sync(_stage) == 0
        if not finished:
            one.rollback()
            assert pg.database.transaction_sync(_stage) == 1
            assert states(pg, child) == "blocked"
            one = Connected(pg)
            one.succeed(a)
        one.commit()
        pg.database.transaction_sync(_stage)
        assert (states(pg, child), edges(pg)) == ("ready", 0)

    def test_a_blocker_finishes_while_its_child_is_enqueued(self, pg):
        """The child's transaction holds the blocker's row as long as its commit takes: the finisher sees the edge."""
        a = put(pg, 1)
        running(pg, a)
        held = threading.Event()
        with Session(pg.database.sync_engine) as session:
            child = pg.enqueue_sync(step, 2, resource_key="p/1", after=a, session=session)
            finisher = []

            @event.listens_for(session, "before_commit")
            def _(_session):  # after the hook that wrote the child
                two = Connected(pg)
                finisher.append(in_thread(lambda: (held.set(), two.succeed(a), two.commit())))
                until_somebody_waits(pg.database, finisher[0])

            session.commit()
        finisher[0].join(LIMIT)
        assert (states(pg, a, child.id), edges(pg)) == ("succeeded ready", 0)

    def test_two_stagers_at_once(self, pg):
        a = put(pg, 1)
        with pg.database.sync_engine.begin() as c:
            pg.enqueue_sync(step, 2, resource_key="p/1", after=a, session=c)
        one, two = Connected(pg), Connected(pg)
        assert dependencies.resolve_dependencies(one.c, one.d, one.d.now(one.c)) == 1
        assert dependencies.resolve_dependencies(two.c, two.d, two.d.now(two.c)) == 0
        one.commit()
        two.commit()

    def test_a_child_is_cancelled_while_its_blocker_finishes(self, pg):
        a = put(pg, 1)
        child = put(pg, 2, after=a)
        running(pg, a)
        one = Connected(pg)
        one.d.run(
            one.c,
            "UPDATE {job} SET state = 'cancelled', finished_at = now(), version = version + 1 WHERE id = :id",
            {"id": one.d.id(child)},
        )
        two = Connected(pg)
        thread = in_thread(lambda: (two.succeed(a), two.commit()))
        until_somebody_waits(pg.database, thread)
        dependencies.release_followers(one.c, one.d, [child], [], one.d.now(one.c))
        one.commit()
        thread.join(LIMIT)
        assert (states(pg, a, child), edges(pg)) == ("succeeded cancelled", 0)


def _stage(c, d):
    return dependencies.resolve_dependencies(c, d, d.now(c))


class TestRepair:
    @pytest.mark.parametrize("wrong", ["edge", "no edge", "unfollowed"])
    async def test_a_stranded_job_is_found(self, app, wrong):
        """What no code does."""
        a = put(app, 1, delay=3600)
        b = put(app, 2, after=a)
        put(app, 3, after=put(app, "other", delay=3600))
        put(app, 4, ordering_key="a", after=a, on_dead="run")
        put(app, 5, ordering_key="a")
        how = {
            "edge": "UPDATE {job} SET state = 'succeeded', finished_at = run_at WHERE id = :id",
            "no edge": "DELETE FROM {dependency} WHERE blocker_id = :id AND on_dead = 'cancel'",
            "unfollowed": "UPDATE {job} SET followed = false WHERE id = :id",
        }[wrong]
        app.database.transaction_sync(lambda c, d: d.run(c, how, {"id": d.id(a)}))
        worker = app.worker()
        await worker.sweeper.chores()
        assert worker.sweeper.repaired == (1 if wrong == "no edge" else 2)
        if wrong == "unfollowed":
            app.sync.jobs.edit(a, delay=0)
        await drain(app)
        assert states(app, b) == "succeeded"


async def test_jobs_that_are_retried_before_anybody_looked_what_they_wait_for(app):
    """On a connection of the program's staging looks later; until then no job is marked followed."""
    a = put(app, 1, delay=3600)
    with app.database.sync_engine.begin() as c:
        b = put(app, 2, after=a, session=c)
    app.sync.jobs.cancel([a, b])
    app.sync.jobs.retry([a, b], rate="1/h")
    assert states(app, a, b) == "ready blocked"
    assert await drain(app) == [1]
    app.sync.jobs.edit(b, delay=0)
    assert await drain(app) == [1, 2]


def test_what_somebody_holds_keeps_nobody_behind_it(postgres_database, monkeypatch):
    """A transaction that holds a job for which many wait, while they are enqueued."""
    monkeypatch.setattr(dependencies, "RESOLVE_LIMIT", 2)
    app = Resilient(postgres_database, handlers=[step])
    held, free = put(app, 1, delay=60), put(app, 2, delay=60)
    with postgres_database.sync_engine.begin() as c:
        app.sync.jobs.cancel(held, session=c)
        those = [put(app, 3, after=held) for _ in range(3)]
        with postgres_database.sync_engine.begin() as other:  # what it waits for is looked at later
            last = put(app, 4, after=free, session=other)
        assert postgres_database.transaction_sync(lambda c, d: dependencies.resolve_dependencies(c, d, d.now(c))) == 1
        assert states(app, *those, last) == "blocked blocked blocked blocked"
    assert postgres_database.transaction_sync(lambda c, d: dependencies.resolve_dependencies(c, d, d.now(c))) == 2
    assert postgres_database.transaction_sync(lambda c, d: dependencies.resolve_dependencies(c, d, d.now(c))) == 1
    assert states(app, *those, last) == "cancelled cancelled cancelled blocked"


@pytest.mark.parametrize("limit", [None, 4])
async def test_a_bulk_retry_of_many_batches_keeps_a_follower_behind_its_blocker(app, monkeypatch, limit):
    """The blocker has the greater id (it was made by a clock that was ahead), so it would be in a later batch."""
    monkeypatch.setattr(changes, "BATCH", 2)
    late = UUID("ffffffff-ffff-7fff-bfff-ffffffffffff")
    a = put(app, "dies")
    b = put(app, 2, after=a)
    more = [put(app, n) for n in (3, 4, 5)]
    await drain(app)
    moved = ("UPDATE {job} SET id = :new WHERE id = :old", "UPDATE {dependency} SET blocker_id = :new")
    await app.database.transaction(
        lambda c, d: [d.run(c, sql, {"new": d.id(late), "old": d.id(a)}) for sql in moved] and None
    )
    await app.jobs.edit(late, payload=1, new_operation=True)
    RAN.clear()
    retried = await app.jobs.retry([late, b, *more], limit=limit)
    assert (retried.retried, retried.not_finished) == (limit or 5, 0)
    assert states(app, late, b) == "ready blocked"
    ran = await drain(app)
    assert sorted(ran) == ([1, 2, 3, 4, 5] if limit is None else [1, 2, 3, 4])
    assert ran.index(1) < ran.index(2)


async def test_a_repair_reads_all_edges_of_a_job_with_more_than_a_window(app, monkeypatch):
    blockers = [put(app, n, delay=3600) for n in range(5)]
    waiting = put(app, "waits", after=blockers)
    monkeypatch.setattr(dependencies, "WINDOW", 2)

    def break_the_last(c, d):
        d.run(c, "UPDATE {job} SET followed = false WHERE id = :id", {"id": d.id(UUID(str(blockers[-1])))})

    app.database.transaction_sync(break_the_last)
    walk, rounds, stranded = dependencies.Walk(), 0, []
    while not rounds or walk != dependencies.Walk():
        jobs, walk = app.database.transaction_sync(lambda c, d, walk=walk: dependencies.repair(c, d, walk, d.now(c)))
        stranded, rounds = [*stranded, *jobs], rounds + 1
    assert (stranded, rounds) == ([UUID(str(waiting))], 3)
