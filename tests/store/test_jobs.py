"""Every statement of store/jobs/insert.py and store/gates/turns.py, on both databases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from resilient.core.jobs.outcomes import Transition
from resilient.store.gates import turns
from resilient.store.jobs import finishing, leases, ready
from resilient.store.jobs import insert as jobs

LEASE = timedelta(seconds=60)


def new(**over):
    return jobs.NewJob(**{"id": uuid4(), "kind": "k", "resource_key": "a/1", "payload": '{"n": 1}', **over})


def rows(database, sql, **params):
    return database.transaction_sync(lambda c, d: [tuple(r) for r in d.run(c, sql, params).all()])


def put(database, *items):
    database.transaction_sync(jobs.insert, items)


def force(database, id_, **columns):
    sets = ", ".join(f"{k} = :{k}" for k in columns)
    database.transaction_sync(
        lambda c, d: d.run(c, f"UPDATE {{job}} SET {sets} WHERE id = :id", {"id": d.id(id_), **columns})
    )


def state(database, id_):
    (found,) = rows(database, "SELECT state FROM {job} WHERE id = :id", id=database.dialect.id(id_))
    return found[0]


def run(database, id_, version=1):
    force(database, id_, state="running", locked_by="w", lease_until=datetime(2030, 1, 1, tzinfo=UTC))
    return version


class TestInsert:
    def test_ready_jobs_get_one_turn_per_resource_with_the_best_priority(self, database):
        put(database, new(priority=1), new(priority=3), new(resource_key="b"))
        assert sorted(rows(database, "SELECT resource_key, priority FROM {turn}")) == [("a/1", 3), ("b", 0)]

    def test_later_jobs_are_scheduled_without_a_turn(self, database, clock):
        put(database, new(delay=60), new(run_at=clock.now() + timedelta(days=9)))
        assert rows(database, "SELECT state FROM {job}") == [("scheduled",), ("scheduled",)]
        assert rows(database, "SELECT 1 FROM {turn}") == []

    def test_a_delay_counts_from_the_databases_now(self, database):
        put(database, new(delay=3600))
        found = database.transaction_sync(ready.read_due)
        assert timedelta(minutes=59) < found.job_at - found.now <= timedelta(hours=1)

    def test_every_column_arrives(self, database, clock):
        job = new(
            payload='{"x": [1, 2.5, null, "ä\\u0001"]}',
            priority=-3,
            expires_at=clock.now(),
            max_attempts=7,
            unique_key="u",
            unique_until="start",
            idempotency_key="i",
            tags='{"user": "7"}',
            trace='{"traceparent": "t"}',
            payload_version=4,
        )
        put(database, job)
        (row,) = rows(
            database,
            "SELECT payload_version, priority, max_attempts, unique_key, unique_lock, unique_until, idempotency_key"
            " FROM {job}",
        )
        assert row == (4, -3, 7, "u", "u", "start", "i")

    def test_ten_thousand_in_one_call(self, database):
        put(database, *(new(resource_key=f"a/{n % 10}") for n in range(10_000)))
        assert rows(database, "SELECT count(*) FROM {job}") == [(10_000,)]
        assert rows(database, "SELECT count(*) FROM {turn}") == [(10,)]

    def test_a_unique_key_is_held_once(self, database):
        first, second = new(unique_key="u"), new(unique_key="u")
        assert database.transaction_sync(jobs.insert_unique, [first]) == {first.id}
        assert database.transaction_sync(jobs.insert_unique, [second]) == set()
        assert database.transaction_sync(jobs.holder, "k", "u").id == first.id


class TestStage:
    def test_due_jobs_become_ready_with_a_turn(self, database, clock):
        put(database, new(delay=10), new(delay=99))
        clock.advance(11)
        assert database.transaction_sync(ready.stage, clock.now()) == 1
        assert rows(database, "SELECT state, version FROM {job} ORDER BY run_at") == [
            ("ready", 2),
            ("scheduled", 1),
        ]
        assert rows(database, "SELECT resource_key FROM {turn}") == [("a/1",)]


class TestFinish:
    def test_success_needs_the_fence(self, database, clock):
        a, b = new(), new()
        put(database, a, b)
        run(database, a.id)
        run(database, b.id)
        done = database.transaction_sync(finishing.succeed_if_held, [(a.id, 1, None), (b.id, 9, None)], clock.now())
        assert done == {a.id}
        assert (state(database, a.id), state(database, b.id)) == ("succeeded", "running")

    def test_a_second_finish_changes_nothing(self, database, clock):
        a = new()
        put(database, a)
        run(database, a.id)
        assert database.transaction_sync(finishing.succeed_if_held, [(a.id, 1, '{"ok": true}')], clock.now()) == {a.id}
        assert database.transaction_sync(finishing.succeed_if_held, [(a.id, 1, None)], clock.now()) == set()

    def test_once_more_goes_back_to_ready(self, database, clock):
        a = new()
        put(database, a)
        run(database, a.id)
        database.transaction_sync(jobs.mark_once_more, a.id, clock.now())
        turned = len(rows(database, "SELECT 1 FROM {turn}"))
        database.transaction_sync(finishing.succeed_if_held, [(a.id, 1, None)], clock.now())
        assert state(database, a.id) == "ready"
        assert len(rows(database, "SELECT 1 FROM {turn}")) == turned + 1

    def test_a_retry_keeps_its_history(self, database, clock):
        a = new()
        put(database, a)
        run(database, a.id)
        finish = finishing.Finish(
            a.id,
            1,
            Transition(
                "scheduled",
                "retry",
                charged=True,
                run_at=clock.now() + timedelta(seconds=5),
                attempts=1,
                error="boom",
                error_kind="transient",
                error_code="http_503",
                status=503,
            ),
            execution=1,
            started_at=clock.now() - timedelta(seconds=2),
            worker_id="w",
        )
        assert database.transaction_sync(finishing.finish_if_held, [finish], clock.now()) == {a.id}
        assert rows(database, "SELECT state, attempts, last_error_code FROM {job}") == [("scheduled", 1, "http_503")]
        (attempt,) = rows(database, "SELECT decision, charged, kind, status, duration, message FROM {attempt}")
        assert (attempt[0], bool(attempt[1]), *attempt[2:]) == ("retry", True, "transient", 503, 2.0, "boom")

    def test_a_deferral_keeps_its_place_and_gets_a_turn(self, database, clock):
        a = new()
        put(database, a)
        before = rows(database, "SELECT run_at FROM {job}")
        run(database, a.id)
        rows_before = len(rows(database, "SELECT 1 FROM {turn}"))
        database.transaction_sync(
            finishing.finish_if_held,
            [finishing.Finish(a.id, 1, Transition("ready", "defer", deferrals=1, waiting_for="a"))],
            clock.now(),
        )
        assert rows(database, "SELECT run_at FROM {job}") == before
        assert rows(database, "SELECT state, deferrals, attempts, waiting_for FROM {job}") == [("ready", 1, 0, "a")]
        assert len(rows(database, "SELECT 1 FROM {turn}")) == rows_before + 1


def test_a_due_job_that_somebody_holds_keeps_no_other_waiting(open_database, postgres_url):
    database = open_database(postgres_url)
    held, free = new(delay=0.0), new(delay=0.0)
    put(database, held, free)
    with database.sync_engine.connect() as other, other.begin(), ThreadPoolExecutor(1) as staging:
        other.exec_driver_sql(f"SELECT 1 FROM resilient_job WHERE id = '{held.id}' FOR UPDATE")
        staged = staging.submit(database.transaction_sync, lambda c, d: ready.stage(c, d, d.now(c)))
        wait([staged], timeout=5)
        in_time = staged.done()
        other.rollback()
    assert in_time
    assert staged.result() == 1
    assert database.transaction_sync(lambda c, d: ready.stage(c, d, d.now(c))) == 1


class TestLeases:
    def test_renewal_needs_the_fence_and_tells_of_cancels(self, database, clock):
        a, b = new(), new()
        put(database, a, b)
        run(database, a.id)
        run(database, b.id)
        force(database, a.id, cancel_requested=True)
        renewed = database.transaction_sync(leases.renew_if_held, [(a.id, 1), (b.id, 2)], LEASE, clock.now())
        assert renewed == {a.id: True}

    def test_overdue_finds_only_ended_leases(self, database, clock):
        a, b = new(), new()
        put(database, a, b)
        run(database, a.id)
        run(database, b.id)
        database.transaction_sync(leases.renew_if_held, [(b.id, 1)], LEASE, clock.now())
        found = database.transaction_sync(leases.overdue, clock.now())
        assert [r.id for r in found] == [a.id]


class TestExpiry:
    def test_waiting_jobs_past_their_expiry_die_with_a_reason(self, database, clock):
        a, b = (
            new(expires_at=clock.now() + timedelta(seconds=5)),
            new(expires_at=clock.now() + timedelta(hours=1)),
        )
        put(database, a, b)
        clock.advance(6)
        assert database.transaction_sync(finishing.expire, clock.now(), lambda at: f"expired at {at:%H:%M}") == 1
        assert (state(database, a.id), state(database, b.id)) == ("dead", "ready")
        assert rows(database, "SELECT last_error_kind, last_error FROM {job} WHERE state = 'dead'") == [
            ("expired", "expired at 12:00")
        ]


class TestMarks:
    def test_a_mark_needs_the_fence(self, database, clock):
        a = new()
        put(database, a)
        run(database, a.id)
        assert database.transaction_sync(leases.mark_sent_if_held, a.id, 1, '{"name": "charge"}', clock.now())
        assert not database.transaction_sync(leases.mark_sent_if_held, a.id, 2, None, clock.now())
        assert database.transaction_sync(leases.set_progress_if_held, a.id, 1, '{"done": 3}', clock.now())


class TestTurns:
    def test_taking_a_key_deletes_all_its_turns_best_priority_first(self, database):
        for key, priority in (("a", 0), ("b", 5), ("a", 1), ("c", 0)):
            database.transaction_sync(turns.insert, [(key, priority)])
        taken = database.transaction_sync(turns.take, turns.Selection(2))
        assert [(t.resource_key, t.priority) for t in taken] == [("b", 5), ("a", 1)]
        assert rows(database, "SELECT resource_key FROM {turn}") == [("c",)]

    def test_oldest_first(self, database):
        for key, priority in (("a", 0), ("b", 5)):
            database.transaction_sync(turns.insert, [(key, priority)])
        assert [
            t.resource_key for t in database.transaction_sync(turns.take, turns.Selection(1, oldest_first=True))
        ] == ["a"]

    def test_bounds_and_skips(self, database):
        database.transaction_sync(turns.insert, [("a", 0), ("b", 0), ("null", 0), ("c", 1)])
        (low,) = rows(database, "SELECT id FROM {turn} WHERE resource_key = 'b'")
        taken = database.transaction_sync(turns.take, turns.Selection(9, priority=0, low=low[0], skip=["null"]))
        assert [t.resource_key for t in taken] == ["b"]

    def test_park_and_release(self, database, clock):
        resource(database, "p", revision=4)
        at, later = clock.now() + timedelta(seconds=5), clock.now() + timedelta(seconds=60)
        parkings = [turns.Parking(f"p/{n}", n, "p", at, later) for n in range(3)]
        database.transaction_sync(turns.park, parkings, {"p": 4})
        assert rows(database, "SELECT count(*) FROM {turn} WHERE parked_on = 'p'") == [(3,)]
        assert database.transaction_sync(turns.due_parked, at).keys() == {"p"}
        assert len(database.transaction_sync(turns.due_parked, at)["p"]) == 1  # the others are spread
        assert database.transaction_sync(turns.release, "p", 2, clock.now()) == 2
        assert sorted(rows(database, "SELECT resource_key FROM {turn} WHERE parked_on IS NULL")) == [
            ("p/1",),
            ("p/2",),
        ]
        assert database.transaction_sync(turns.due_parked, clock.now() + timedelta(seconds=1)).keys() == {"p"}

    def test_parking_again_keeps_one_row_per_key(self, database, clock):
        resource(database, "p")
        resource(database, "q")
        for on in ("p", "q"):
            database.transaction_sync(turns.park, [turns.Parking("k", 0, on, clock.now(), clock.now())], {})
        assert rows(database, "SELECT resource_key, parked_on FROM {turn}") == [("k", "q")]

    def test_a_gate_that_moved_meanwhile_strands_nobody(self, database, clock):
        resource(database, "p", revision=5)
        database.transaction_sync(turns.park, [turns.Parking("k", 2, "p", clock.now(), clock.now())], {"p": 4})
        assert rows(database, "SELECT resource_key, priority, parked_on FROM {turn}") == [("k", 2, None)]

    def test_stranded_keys_are_found(self, database, clock):
        put(database, new(resource_key="a"), new(resource_key="b", priority=4), new(resource_key="c"))
        database.transaction_sync(lambda c, d: d.run(c, "DELETE FROM {turn} WHERE resource_key <> 'a'"))
        resource(database, "c")
        database.transaction_sync(turns.park, [turns.Parking("c", 0, "c", clock.now(), clock.now())], {})
        assert database.transaction_sync(turns.stranded) == [("b", 4)]


def resource(database, key, revision=0):
    database.transaction_sync(
        lambda c, d: d.run(
            c,
            "INSERT INTO {resource} (key, revision, created_at, updated_at) VALUES (:key, :revision, :now, :now)",
            {"key": key, "revision": revision, "now": d.now(c)},
        )
    )


@pytest.mark.parametrize("payload", ["0.1000000000000000055", "12345678901234567890123", '"7"', "[]"])
def test_a_payload_keeps_its_text(database, payload):
    put(database, new(payload=payload))
    ((text,),) = rows(database, "SELECT {payload} FROM {job}")
    assert (text.decode() if database.is_sqlite else text) == payload
