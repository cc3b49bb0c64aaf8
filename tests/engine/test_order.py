"""Ordering keys: jobs of one resource and key run one after the other, in the order of their commits."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from resilient import InvalidInput, Item, Job, Permanent, Resilient, Retention, Snooze, SyncJob, Transient, handler
from resilient.store.jobs import finishing, order
from tests.helpers import LIMIT, settle
from tests.interleaving import until_somebody_waits

RAN: list[tuple[str, int | None, object]] = []


@handler("step")
async def step(job: Job[object]) -> None:
    RAN.append((job.ordering_key, job.order_no, job.payload))
    if job.payload == "dies":
        raise Permanent("no")
    if job.payload == "fails once" and job.attempt == 1:
        raise Transient("try again")
    if job.payload == "snoozes" and job.execution == 1:
        raise Snooze(3600)


@handler("slow")
def slow(job: SyncJob[object]) -> None:
    RAN.append((job.ordering_key, job.order_no, job.payload))


@pytest.fixture
async def app(database):
    RAN.clear()
    app = Resilient(database, handlers=[step, slow], upgrade=False)
    yield app
    await app.close()


def put(app, *payloads, key="a", on="p/1", **options):
    """Enqueue, each in a transaction of its own; their ids."""
    return [app.sync.enqueue(step, payload, resource_key=on, ordering_key=key, **options).id for payload in payloads]


def states(app, ids):
    return " ".join(str(app.sync.jobs.get(id_).state) for id_ in ids)


async def drain(app):
    """Run everything that can run; the payloads that ran."""
    await settle(app)
    return [payload for _, _, payload in RAN]


class TestInOrder:
    async def test_one_after_the_other(self, app):
        ids = put(app, 1, 2, 3)
        assert states(app, ids) == "ready blocked blocked"
        assert await drain(app) == [1, 2, 3]
        assert [no for _, no, _ in RAN] == [1, 2, 3]
        assert states(app, ids) == "succeeded succeeded succeeded"

    async def test_lanes_are_apart(self, app):
        a, b, c = put(app, 1, 2), put(app, 3, 4, key="b"), put(app, 5, 6, on="p/2")
        assert states(app, [*a, *b, *c]) == "ready blocked ready blocked ready blocked"
        await drain(app)
        for lane in ([1, 2], [3, 4], [5, 6]):
            assert [p for _, _, p in RAN if p in lane] == lane

    async def test_an_empty_lane_begins_anew(self, app):
        put(app, 1)
        await drain(app)
        (second,) = put(app, 2)
        assert app.sync.jobs.get(second).order_no == 2
        assert states(app, [second]) == "ready"
        assert await drain(app) == [1, 2]

    async def test_many_at_once_and_items(self, app):
        items = [Item(n, ordering_key=f"k{n % 3}") for n in range(30)]
        await app.enqueue_many(step, items, resource_key="p/1")
        await app.enqueue_many(step, range(30, 60), resource_key="p/1", ordering_key="k0")
        await drain(app)
        for key in ("k0", "k1", "k2"):
            mine = [(no, payload) for name, no, payload in RAN if name == key]
            assert [no for no, _ in mine] == list(range(1, len(mine) + 1))
            assert [payload for _, payload in mine] == sorted(payload for _, payload in mine)
        assert len(RAN) == 60

    async def test_plain_functions_in_threads_too(self, app):
        await app.enqueue_many(slow, range(20), resource_key="p/1", ordering_key="a")
        assert await drain(app) == list(range(20))

    async def test_a_later_head_keeps_its_place(self, app):
        first = put(app, 1, delay=3600)
        rest = put(app, 2, 3)
        assert states(app, first + rest) == "scheduled blocked blocked"
        assert await drain(app) == []

    async def test_a_follower_with_a_time_is_scheduled_when_its_turn_comes(self, app):
        ids = put(app, 1) + put(app, 2, delay=3600) + put(app, 3)
        assert await drain(app) == [1]
        assert states(app, ids) == "succeeded scheduled blocked"

    async def test_with_a_unique_key(self, app):
        a = put(app, 1, unique_key="u")
        b = put(app, 2, unique_key="v")
        again = app.sync.enqueue(step, 9, resource_key="p/1", ordering_key="a", unique_key="v")
        replaced = app.sync.enqueue(
            step, 8, resource_key="p/1", ordering_key="a", unique_key="v", on_conflict="replace"
        )
        c = put(app, 3)
        assert (again.created, again.id, replaced.id) == (False, b[0], b[0])
        assert states(app, a + b + c) == "ready blocked blocked"
        assert await drain(app) == [1, 8, 3]
        assert [no for _, no, _ in RAN] == [1, 2, 3]

    async def test_jobs_without_a_key_do_not_wait(self, app):
        put(app, 1, delay=3600)
        await app.enqueue(step, 2, resource_key="p/1")
        assert await drain(app) == [2]


class TestRetries:
    async def test_a_failing_head_blocks_only_its_lane(self, database, clock):
        app = Resilient(database, handlers=[step], upgrade=False)
        RAN.clear()
        ids = put(app, "fails once", 2)
        other = put(app, 3, 4, key="b")
        assert sorted(map(str, await drain(app))) == ["3", "4", "fails once"]
        assert states(app, ids + other) == "scheduled blocked succeeded succeeded"
        clock.advance(hours=1)
        assert (await drain(app))[-2:] == ["fails once", 2]
        await app.close()

    async def test_a_snoozing_head_keeps_its_place(self, app):
        ids = put(app, "snoozes", 2)
        assert await drain(app) == ["snoozes"]
        assert states(app, ids) == "scheduled blocked"

    async def test_a_dead_head_blocks_until_it_is_retried(self, app):
        ids = put(app, "dies", 2, 3)
        assert await drain(app) == ["dies"]
        assert states(app, ids) == "dead blocked blocked"
        put(app, 4)  # goes to the end of a line that stands
        app.sync.jobs.edit(ids[0], payload="better", new_operation=True)
        assert app.sync.jobs.retry(ids[0]).retried == 1
        assert await drain(app) == ["dies", "better", 2, 3, 4]

    async def test_a_dead_head_blocks_until_it_is_discarded(self, app):
        put(app, "dies", 2)
        await drain(app)
        app.sync.jobs.discard(state="dead")
        assert await drain(app) == ["dies", 2]

    async def test_a_dead_head_blocks_until_it_is_deleted(self, app):
        put(app, "dies", 2)
        await drain(app)
        app.sync.jobs.delete(state="dead")
        assert await drain(app) == ["dies", 2]

    async def test_or_is_skipped(self, app):
        ids = put(app, "dies", 2, ordering_policy="skip")
        assert await drain(app) == ["dies", 2]
        assert states(app, ids) == "dead succeeded"

    async def test_what_was_skipped_is_next_once_it_is_retried(self, app):
        ids = put(app, "dies", ordering_policy="skip")
        await drain(app)
        ids += put(app, 2, 3)
        app.sync.jobs.edit(ids[0], payload="late", new_operation=True)
        app.sync.jobs.retry(ids[0])
        assert states(app, ids) == "blocked ready blocked"
        assert await drain(app) == ["dies", 2, "late", 3]

    async def test_replayed_in_an_idle_lane(self, app):
        ids = put(app, 1, 2, 3)
        await drain(app)
        assert app.sync.jobs.retry(state="succeeded").retried == 3
        assert states(app, ids) == "ready blocked blocked"
        assert await drain(app) == [1, 2, 3, 1, 2, 3]
        assert put(app, 4)
        assert await drain(app) == [1, 2, 3, 1, 2, 3, 4]

    async def test_replayed_after_its_lane_was_forgotten(self, database, clock):
        app = Resilient(database, handlers=[step], upgrade=False, retention=Retention(dead=None, succeeded=None))
        RAN.clear()
        ids = put(app, 1, 2, "dies", ordering_policy="skip")
        await drain(app)
        clock.advance(days=400)
        await app.prune()
        assert _lanes(app) == 0
        app.sync.jobs.retry(ids[1])
        assert await drain(app) == [1, 2, "dies", 2]
        assert put(app, 3)
        assert await drain(app) == [1, 2, "dies", 2, 3]
        await app.close()

    async def test_replayed_at_a_bounded_rate(self, database, clock):
        app = Resilient(database, handlers=[step], upgrade=False)
        RAN.clear()
        ids = put(app, 1, 2, 3)
        await drain(app)
        app.sync.jobs.retry(state="succeeded", rate="1/min")
        assert await drain(app) == [1, 2, 3, 1]
        assert states(app, ids) == "succeeded scheduled blocked"
        clock.advance(minutes=2)
        assert await drain(app) == [1, 2, 3, 1, 2, 3]
        await app.close()


class TestEnds:
    @pytest.mark.parametrize("which", [[0], [1], [0, 1], [1, 2], [0, 1, 2, 3]])
    async def test_cancelled_jobs_are_passed_over(self, app, which):
        ids = put(app, 1, 2, 3, 4)
        app.sync.jobs.cancel([ids[n] for n in which])
        assert await drain(app) == [n + 1 for n in range(4) if n not in which]

    async def test_an_expired_head_is_passed_over_whatever_its_policy(self, database, clock):
        app = Resilient(database, handlers=[step], upgrade=False)
        RAN.clear()
        put(app, 1, expires_in=60, delay=120)
        put(app, 2)
        put(app, 3, expires_at=clock.now() + timedelta(seconds=60))
        put(app, 4)
        clock.advance(minutes=10)
        worker = app.worker()
        await worker.sweeper.chores()
        assert await drain(app) == [2, 4]
        await app.close()

    async def test_a_cancel_requested_while_it_runs(self, app):
        ids = put(app, 1, 2)
        started, go = asyncio.Event(), asyncio.Event()

        @handler("step")
        async def patient(job: Job[object]) -> None:
            RAN.append((job.ordering_key, job.order_no, job.payload))
            started.set()
            await go.wait()
            if job.payload == 1:
                raise Transient("no")

        other = Resilient(app.database, handlers=[patient], upgrade=False)
        run = asyncio.create_task(other.worker().drain(timeout=LIMIT))
        await started.wait()
        assert app.sync.jobs.cancel(ids[0]).requested == 1
        go.set()
        await run
        assert states(app, ids) == "cancelled succeeded"

    async def test_a_dead_job_that_others_wait_for_is_not_pruned(self, database, clock):
        app = Resilient(database, handlers=[step], upgrade=False, retention=Retention(dead="1d"))
        RAN.clear()
        waited, alone = put(app, "dies", 2), put(app, "dies", key="b")
        await drain(app)
        clock.advance(days=30)
        assert (await app.prune(older_than="1d", dry_run=True)).dead == 1
        assert (await app.prune(older_than="1d")).dead == 1
        assert states(app, waited) == "dead blocked"
        assert app.sync.jobs.count(ids=alone) == 0
        put(app, 5, key="b")
        assert (await drain(app))[-1] == 5
        await app.close()


class TestCommits:
    """Numbers follow commits, not calls."""

    async def test_the_order_is_that_of_the_commits(self, postgres_url, open_database):
        app = Resilient(open_database(postgres_url), handlers=[step], upgrade=False)
        RAN.clear()
        engine = app.database.sync_engine
        with Session(engine) as one, Session(engine) as two:
            app.enqueue_sync(step, "called first", resource_key="p/1", ordering_key="a", session=one)
            app.enqueue_sync(step, "committed first", resource_key="p/1", ordering_key="a", session=two)
            two.commit()
            one.commit()
        assert await drain(app) == ["committed first", "called first"]
        await app.close()

    async def test_a_savepoint_takes_its_own_back(self, app):
        with Session(app.database.sync_engine) as session:
            app.enqueue_sync(step, 1, resource_key="p/1", ordering_key="a", session=session)
            with session.begin_nested() as savepoint:
                app.enqueue_sync(step, 2, resource_key="p/1", ordering_key="a", session=session)
                savepoint.rollback()
            with session.begin_nested():
                app.enqueue_sync(step, 3, resource_key="p/1", ordering_key="a", session=session)
            session.commit()
        assert await drain(app) == [1, 3]
        assert [no for _, no, _ in RAN] == [1, 2]

    async def test_nothing_is_numbered_by_a_rollback(self, app):
        with Session(app.database.sync_engine) as session:
            app.enqueue_sync(step, 1, resource_key="p/1", ordering_key="a", session=session)
            session.rollback()
        put(app, 2)
        assert await drain(app) == [2]
        assert RAN[0][1] == 1

    async def test_async_sessions(self, app):
        url = app.database.url
        engine = create_async_engine(
            url.set(drivername="sqlite+aiosqlite" if app.database.is_sqlite else "postgresql+psycopg")
        )
        async with AsyncSession(engine) as session:
            done = await app.enqueue(step, 1, resource_key="p/1", ordering_key="a", session=session)
            await app.enqueue_many(step, [2, 3], resource_key="p/1", ordering_key="a", session=session)
            await session.commit()
        await engine.dispose()
        assert done.created is None
        assert await drain(app) == [1, 2, 3]

    async def test_on_a_connection_they_are_written_at_once(self, app):
        with app.database.sync_engine.begin() as c:
            app.enqueue_sync(step, 1, resource_key="p/1", ordering_key="a", session=c)
            app.enqueue_sync(step, 2, resource_key="p/1", ordering_key="a", session=c)
            assert _numbers(c, app) == [1, 2]
        assert await drain(app) == [1, 2]

    async def test_on_a_foreign_transaction_too(self, app):
        with app.database.sync_engine.begin() as c, Session(bind=c, join_transaction_mode="create_savepoint") as s:
            app.enqueue_sync(step, 1, resource_key="p/1", ordering_key="a", session=s)
            s.commit()
            assert _numbers(c, app) == [1]
        assert await drain(app) == [1]

    def test_two_transactions_with_the_same_keys_in_opposite_orders(self, postgres_url, open_database):
        """500 keys each, called in opposite orders, committed at once: no deadlock."""
        app = Resilient(open_database(postgres_url), handlers=[step], upgrade=False)
        keys = [f"k{n}" for n in range(500)]
        barrier, errors = threading.Barrier(4), []

        def publish(mine):
            try:
                for _ in range(5):
                    with Session(app.database.sync_engine) as session:
                        for key in mine:
                            app.enqueue_sync(step, key, resource_key="p/1", ordering_key=key, session=session)
                        barrier.wait(LIMIT)
                        session.commit()
            except Exception as error:  # noqa: BLE001 - shown below
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=publish, args=(mine,)) for mine in (keys, keys[::-1]) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        rows = app.database.transaction_sync(
            lambda c, d: d.run(c, "SELECT count(*), min(last_no), max(last_no) FROM {order}").one()
        )
        assert tuple(rows) == (500, 20, 20)


class TestRaces:
    """Scripted, on two connections."""

    @pytest.fixture
    def pg(self, postgres_url, open_database):
        RAN.clear()
        return Resilient(open_database(postgres_url), handlers=[step], upgrade=False)

    def test_the_next_one_is_cancelled_while_it_is_promoted(self, pg):
        head, follower, third = put(pg, 1, 2, 3)
        _run(pg, head)
        with pg.database.sync_engine.connect() as other:
            held = other.begin()
            pg.sync.jobs.cancel(follower, session=other)
            thread = _thread(lambda: pg.database.transaction_sync(_succeed, head))
            until_somebody_waits(pg.database, thread)
            held.commit()
            thread.join(LIMIT)
        assert states(pg, [head, follower, third]) == "succeeded cancelled ready"

    def test_a_cancel_of_the_next_one_is_rolled_back_while_it_is_promoted(self, pg):
        head, follower, third = put(pg, 1, 2, 3)
        _run(pg, head)
        with pg.database.sync_engine.connect() as other:
            held = other.begin()
            pg.sync.jobs.cancel(follower, session=other)
            thread = _thread(lambda: pg.database.transaction_sync(_succeed, head))
            until_somebody_waits(pg.database, thread)
            held.rollback()
            thread.join(LIMIT)
        assert states(pg, [head, follower, third]) == "succeeded ready blocked"

    @pytest.mark.parametrize("commits", [True, False])
    def test_a_job_is_enqueued_while_the_last_one_finishes(self, pg, commits):
        """The finisher waits for the lane, and sees what was committed meanwhile."""
        (head,) = put(pg, 1)
        _run(pg, head)
        with pg.database.sync_engine.connect() as other:
            held = other.begin()
            made = pg.sync.enqueue(step, 2, resource_key="p/1", ordering_key="a", session=other)
            thread = _thread(lambda: pg.database.transaction_sync(_succeed, head))
            until_somebody_waits(pg.database, thread)
            (held.commit if commits else held.rollback)()
            thread.join(LIMIT)
        if commits:
            assert states(pg, [head, made.id]) == "succeeded ready"
        else:
            assert states(pg, [head, *put(pg, 3)]) == "succeeded ready"

    def test_the_last_one_finishes_while_a_job_is_enqueued(self, pg):
        """The other way round: whoever enqueues finds the lane empty."""
        (head,) = put(pg, 1)
        _run(pg, head)
        with pg.database.sync_engine.connect() as other:
            held, made = other.begin(), []
            _succeed(other, pg.database.dialect, head)
            thread = _thread(lambda: made.extend(put(pg, 2)))
            until_somebody_waits(pg.database, thread)
            held.commit()
            thread.join(LIMIT)
        assert states(pg, [head, *made]) == "succeeded ready"

    def test_a_completion_is_rolled_back(self, pg):
        head, follower = put(pg, 1, 2)
        _run(pg, head)
        with pg.database.sync_engine.connect() as other:
            held = other.begin()
            _succeed(other, pg.database.dialect, head)
            held.rollback()
        assert states(pg, [head, follower]) == "running blocked"
        pg.database.transaction_sync(_succeed, head)
        assert states(pg, [head, follower]) == "succeeded ready"


def _run(app, id_):
    """As a claim leaves it."""
    sets = "state = 'running', version = version + 1, locked_by = 'w', lease_until = now()"
    app.database.transaction_sync(lambda c, d: d.run(c, f"UPDATE {{job}} SET {sets} WHERE id = :id", {"id": d.id(id_)}))


def _succeed(c, d, id_):
    assert finishing.succeed_if_held(c, d, [(id_, 2, None)], d.now(c)) == {id_}


def _thread(fn):
    thread = threading.Thread(target=fn, daemon=True)
    thread.start()
    return thread


def _numbers(c: Connection, app):
    return [r[0] for r in app.database.dialect.run(c, "SELECT order_no FROM {job} ORDER BY order_no")]


def _lanes(app):
    return app.database.transaction_sync(lambda c, d: d.run(c, "SELECT count(*) FROM {order}").scalar())


class TestRefused:
    async def test_a_priority(self, app):
        with pytest.raises(InvalidInput, match="priority=3 with ordering_key='a'"):
            await app.enqueue(step, 1, resource_key="p/1", ordering_key="a", priority=3)

    async def test_an_unknown_policy(self, app):
        with pytest.raises(InvalidInput, match='"block" or "skip", not \'wait\''):
            await app.enqueue(step, 1, resource_key="p/1", ordering_key="a", ordering_policy="wait")

    @pytest.mark.parametrize("key", ["", "a\nb", "x" * 256])
    async def test_a_bad_key(self, app, key):
        with pytest.raises(InvalidInput, match="ordering_key must be 1 to 255"):
            await app.enqueue(step, 1, resource_key="p/1", ordering_key=key)

    async def test_any_other_text_is_a_key(self, app):
        for key in ('{"a": "b\\"}', "ключ 🔑", "null", "a,b'c"):
            put(app, key, key=key)
        await drain(app)
        assert sorted(key for key, _, _ in RAN) == sorted(payload for _, _, payload in RAN)


class TestRepair:
    @pytest.mark.parametrize("head", ["gone", "over"])
    async def test_a_lane_that_stands_still_is_found(self, app, head):
        """What no code does: the head disappears or ends without a word to its lane."""
        put(app, 1, 2, 3)
        put(app, "dies", 5, key="b")  # a lane that waits rightly
        await app.worker().drain(timeout=LIMIT)  # all of lane a, the head of b
        RAN.clear()
        first = put(app, 6, 7, 8)[0]
        how = "DELETE FROM {job}" if head == "gone" else "UPDATE {job} SET state = 'cancelled', finished_at = run_at"
        app.database.transaction_sync(lambda c, d: d.run(c, how + " WHERE id = :id", {"id": d.id(first)}))
        worker = app.worker()
        assert await worker.drain(timeout=LIMIT) == 0
        await worker.sweeper.chores()
        assert worker.sweeper.repaired == 1
        assert await drain(app) == [7, 8]

    def test_a_look_at_many_lanes_finds_only_what_is_wrong(self, database):
        app = Resilient(database, handlers=[step], upgrade=False)
        app.sync.enqueue_many(step, [Item(n, ordering_key=f"k{n % 50}") for n in range(150)], resource_key="p/1")
        assert database.transaction_sync(lambda c, d: order.repair(c, d, d.now(c))) == 0
        head = "SELECT head_id FROM {order} WHERE ordering_key IN ('k7', 'k30')"
        database.transaction_sync(lambda c, d: d.run(c, f"DELETE FROM {{job}} WHERE id IN ({head})"))
        assert database.transaction_sync(lambda c, d: order.repair(c, d, d.now(c))) == 2
        assert database.transaction_sync(lambda c, d: order.repair(c, d, d.now(c))) == 0
