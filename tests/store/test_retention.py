"""Deleting what is over, and nothing else, in bounded batches that wait for nobody."""

from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import event

from resilient import InvalidInput
from resilient.core.gates.rate_limit import LimitState
from resilient.core.jobs.outcomes import Transition
from resilient.store.gates import limits, resources, turns
from resilient.store.inspect import retention
from resilient.store.jobs import finishing
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.finishing import Finish

DAY = timedelta(days=1)


@pytest.fixture
def finished(database, clock):
    """Put finished jobs, each with a history row; their ids."""

    def put(state, count=1, *, ago=timedelta(0)):
        ids = [uuid4() for _ in range(count)]

        def write(c, d):
            at = clock.now() - ago
            jobs.insert(c, d, [jobs.NewJob(id=i, kind="k", resource_key="a/1", payload="1") for i in ids])
            d.run(
                c,
                "UPDATE {job} SET state = :state, finished_at = :at_at"
                f" WHERE id IN (SELECT value FROM {d.array('ids', 'uuid')})",
                {"state": state, "at_at": at, "ids": d.pack_ids(ids)},
            )
            history = [Finish(i, 1, Transition(state, "dead", error="x"), execution=1) for i in ids]
            finishing.record_attempts(c, d, history, at)
            d.run(c, "DELETE FROM {turn}")

        database.transaction_sync(write)
        return ids

    return put


@pytest.fixture
def left(read_all):
    return lambda table: read_all(f"SELECT count(*) AS n FROM {{{table}}}")[0]["n"]


class TestFinished:
    def prune(self, database, state, before, **options):
        return database.transaction_sync(retention.prune_finished, state, before, **{"limit": 100, **options})

    def test_only_old_ones_of_the_state_with_their_history(self, database, clock, finished, left):
        finished("succeeded", 3, ago=8 * DAY)
        finished("succeeded", 2, ago=6 * DAY)
        finished("dead", 1, ago=8 * DAY)
        assert self.prune(database, "succeeded", clock.now() - 7 * DAY) == (3, None)
        assert (left("job"), left("attempt")) == (3, 3)
        assert database.transaction_sync(retention.count_finished, "dead", clock.now(), limit=9) == 1

    def test_the_oldest_first_and_on_from_there(self, database, clock, finished, left):
        for day in (9, 8, 7):
            finished("dead", ago=day * DAY)
        gone, since = self.prune(database, "dead", clock.now(), limit=2)
        assert (gone, since) == (2, clock.now() - 8 * DAY)
        assert self.prune(database, "dead", clock.now(), limit=2, since=since) == (1, None)
        assert (left("job"), left("attempt")) == (0, 0)

    def test_events_and_what_is_none_apart_though_all_ended_at_one_moment(self, database, clock, finished, read_all):
        finished("succeeded", 7, ago=DAY)
        finished("dead", 2, ago=DAY)
        some = "SELECT id FROM {job} WHERE state <> 'dead' LIMIT 3"
        to_outbox = f"UPDATE {{job}} SET resource_key = 'outbox/orders' WHERE id IN ({some})"
        database.transaction_sync(lambda c, d: d.run(c, to_outbox))

        def walk(events):
            total, behind, steps = 0, None, 0
            while steps == 0 or behind is not None:
                gone, behind = database.transaction_sync(
                    retention.prune_succeeded, clock.now(), events=events, behind=behind, limit=2, most=2
                )
                total, steps = total + gone, steps + 1
            return total

        counted = [retention.count_finished, "succeeded", clock.now()]
        assert [database.transaction_sync(*counted, limit=9, events=events) for events in (True, False)] == [3, 4]
        assert walk(events=False) == 4
        assert {r["resource_key"] for r in read_all("SELECT resource_key FROM {job} WHERE state <> 'dead'")} == {
            "outbox/orders"
        }
        assert walk(events=True) == 3
        assert [r["state"] for r in read_all("SELECT state FROM {job}")] == ["dead", "dead"]

    def test_unfinished_jobs_are_never_pruned(self, database, clock):
        with pytest.raises(InvalidInput, match="ready jobs are not over: only cancelled, dead, succeeded"):
            self.prune(database, "ready", clock.now())

    def test_what_somebody_holds_is_left_and_not_waited_for(self, postgres_url, open_database, clock):
        one, two = open_database(postgres_url), open_database(postgres_url)
        ids = [uuid4(), uuid4()]

        def put(c, d):
            jobs.insert(c, d, [jobs.NewJob(id=i, kind="k", resource_key="a", payload="1") for i in ids])
            d.run(c, "UPDATE {job} SET state = 'dead', finished_at = :now", {"now": clock.now()})

        one.transaction_sync(put)

        def hold(c, d):
            d.run(c, "SELECT 1 FROM {job} WHERE id = :id FOR UPDATE", {"id": str(ids[0])})
            return self.prune(two, "dead", clock.now() + DAY)

        assert one.transaction_sync(hold) == (1, None)
        assert self.prune(two, "dead", clock.now() + DAY) == (1, None)

    def test_a_batch_reads_no_more_than_its_rows(self, postgres_database):
        """Among 100,000 finished jobs every step goes through an index."""

        def plan(c, d):
            d.run(
                c,
                "WITH put AS (INSERT INTO {job} (id, kind, resource_key, payload, state, run_at, created_at,"
                " updated_at, finished_at) SELECT gen_random_uuid(), 'k', 'a', '1', 'succeeded', now(), now(), now(),"
                " now() - n * interval '1 second' FROM generate_series(1, 100000) n RETURNING id)"
                " INSERT INTO {attempt} (job_id, execution, finished_at, decision, charged)"
                " SELECT id, 1, now(), 'retry', true FROM put",
            )
            c.exec_driver_sql("ANALYZE resilient_job, resilient_attempt")
            before = d.now(c) - timedelta(hours=1)
            reads = "SELECT sum(seq_tup_read) FROM pg_stat_xact_user_tables"
            start = c.exec_driver_sql(reads).scalar_one()
            assert retention.prune_finished(c, d, "succeeded", before, limit=500)[0] == 500
            gone, behind = retention.prune_succeeded(c, d, before, events=True, limit=500, most=500)
            assert gone == 0
            assert retention.prune_succeeded(c, d, before, events=False, behind=behind, limit=500, most=400)[0] == 400
            return c.exec_driver_sql(reads).scalar_one() - start

        assert postgres_database.transaction_sync(plan) == 0

    def test_a_dead_head_costs_the_same_however_many_wait_behind_it(self, postgres_database):
        """Each is judged by three look-ups, and none by a walk through its lane, or by a hash over all of a table."""

        def plan(c, d):
            d.run(
                c,
                "WITH put AS (INSERT INTO {job} (id, kind, resource_key, payload, state, run_at, created_at,"
                " updated_at, finished_at, ordering_key, order_no, ordering_policy, followed) SELECT gen_random_uuid(),"
                " 'k', 'a', '1', 'dead', now(), now(), now(), now() - n * interval '1 second', 'o' || n, 1, 'block',"
                " true FROM generate_series(1, 20000) n RETURNING id, ordering_key)"
                " INSERT INTO {order} (resource_key, ordering_key, last_no, head_id, seek_no, updated_at)"
                " SELECT 'a', ordering_key, 1, id, 1, now() FROM put",
            )
            d.run(
                c,
                "INSERT INTO {job} (id, kind, resource_key, payload, state, run_at, created_at, updated_at,"
                " ordering_key, order_no, ordering_policy, waits) SELECT gen_random_uuid(), 'k', 'a', '1', 'blocked',"
                " now(), now(), now(), 'o' || (1 + n / 1000), 1, 'block', 1 FROM generate_series(1000, 30999) n",
            )
            c.exec_driver_sql("ANALYZE resilient_job, resilient_order")
            explained = []

            @event.listens_for(c, "before_cursor_execute")
            def explain(_c, cursor, statement, parameters, _context, _many):
                if statement.startswith("SELECT id, finished_at"):
                    cursor.execute("EXPLAIN (ANALYZE, FORMAT JSON) " + statement, parameters)
                    explained.append(cursor.fetchone()[0][0]["Plan"])

            d.steer(c)
            before = d.now(c) - timedelta(seconds=1)
            gone, _ = retention.prune_finished(c, d, "dead", before, limit=500)
            event.remove(c, "before_cursor_execute", explain)
            return gone, explained

        (gone, explained) = postgres_database.transaction_sync(plan)
        assert (gone, len(explained)) == (500, 1)
        assert "Hash" not in str(explained)
        assert rows_of(explained[0]) < 500 * 8

    def test_only_a_dead_head_that_holds_others_up_is_spared(self, database, clock, read_all):
        """Not because it is dead, nor because numbers were given since: those jobs may be over."""

        def put(c, d):
            heads = [uuid4() for _ in range(3)]
            row = {"kind": "k", "resource_key": "a", "payload": "1", "ordering_policy": "block"}
            jobs.insert(c, d, [
                *(jobs.NewJob(id=i, ordering_key=f"o{n}", order_no=1, **row) for n, i in enumerate(heads)),
                jobs.NewJob(id=uuid4(), ordering_key="o1", order_no=1, waits=1, **row),
            ])  # fmt: skip
            d.run(c, "UPDATE {job} SET state = 'dead', finished_at = :now WHERE waits = 0", {"now": clock.now() - DAY})
            for n, (head, last) in enumerate(zip(heads, (1, 1, 5), strict=True)):
                d.run(
                    c,
                    "INSERT INTO {order} (resource_key, ordering_key, last_no, head_id, seek_no, updated_at)"
                    " VALUES ('a', :name, :last, :id, 1, :now)",
                    {"name": f"o{n}", "last": last, "id": d.id(head), "now": clock.now()},
                )

        database.transaction_sync(put)
        assert database.transaction_sync(retention.count_finished, "dead", clock.now(), limit=9) == 2
        assert self.prune(database, "dead", clock.now())[0] == 2
        assert [r["ordering_key"] for r in read_all("SELECT ordering_key FROM {job} WHERE state = 'dead'")] == ["o1"]


def rows_of(node):
    """How many rows a plan has read."""
    own = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
    return (own if "Relation Name" in node else 0) + sum(map(rows_of, node.get("Plans", ())))


class TestAttempts:
    def test_old_history_of_jobs_that_live(self, database, clock, finished, left):
        finished("dead", 3, ago=9 * DAY)
        finished("dead", 2)
        before = clock.now() - DAY
        assert database.transaction_sync(retention.count_attempts, before, 100) == 3
        assert database.transaction_sync(retention.prune_attempts, before, 2) == (2, True)
        assert database.transaction_sync(retention.prune_attempts, before, 2) == (1, False)
        assert (left("job"), left("attempt")) == (5, 2)


class TestIdle:
    @pytest.fixture
    def forget(self, database, clock):
        """Forget what was idle for a month, a month after it was made; the keys that are left."""

        def forget():
            clock.advance(days=31)
            before = clock.now() - 30 * DAY
            told = database.transaction_sync(retention.forget_idle, before, "", dry_run=True)
            keys = database.transaction_sync(lambda c, d: set(d.run(c, "SELECT key FROM {resource}").scalars()))
            gone = database.transaction_sync(retention.forget_idle, before, "")
            left = database.transaction_sync(lambda c, d: set(d.run(c, "SELECT key FROM {resource}").scalars()))
            assert told == gone == (len(keys) - len(left), None)
            return left

        return forget

    def test_what_nobody_uses_goes_with_its_limits(self, database, forget, left):
        database.transaction_sync(resources.ensure, ["a", "a/1", "b"])
        database.transaction_sync(limits.insert, [("a/1", "x")])
        assert forget() == set()
        assert left("rate_limit") == 0

    @pytest.mark.parametrize(
        "sets",
        [
            "breaker = 'open'",
            "auth = 'needs_reauth'",
            "paused_at = :now",
            "policy = '{{}}'",
            "blocked_until = :later_at",
            "updated_at = :later_at",
        ],
    )
    def test_what_stands_out_stays(self, database, clock, forget, sets):
        database.transaction_sync(resources.ensure, ["a", "b"])
        params = {"now": clock.now(), "later_at": clock.now() + 9 * DAY}
        used = {k: v for k, v in params.items() if f":{k}" in sets}
        database.transaction_sync(lambda c, d: d.run(c, f"UPDATE {{resource}} SET {sets} WHERE key = 'a'", used))
        assert forget() == {"a"}

    def test_where_work_waits_or_runs(self, database, forget):
        database.transaction_sync(resources.ensure, ["a", "a/1", "b", "c/1", "d", "ax"])
        database.transaction_sync(turns.insert, {"b": 0})
        database.transaction_sync(
            lambda c, d: d.run(
                c,
                "INSERT INTO {turn} (resource_key, parked_on, recheck_at) VALUES ('c/1', 'd', :now)",
                {"now": d.now(c)},
            )
        )
        job = jobs.NewJob(id=uuid4(), kind="k", resource_key="a/1", payload="1")
        database.transaction_sync(jobs.insert, [job])
        database.transaction_sync(lambda c, d: d.run(c, "DELETE FROM {turn} WHERE resource_key = 'a/1'"))
        assert forget() == {"a", "a/1", "b", "c/1", "d"}

    def test_a_limit_that_is_still_spent(self, database, clock, forget):
        database.transaction_sync(resources.ensure, ["a"])
        database.transaction_sync(limits.insert, [("a", "monthly")])
        later = (clock.now() + 40 * DAY).timestamp()
        database.transaction_sync(lambda c, d: d.run(c, "UPDATE {rate_limit} SET tat = :tat", {"tat": later}))
        assert forget() == {"a"}

    def test_windows_of_many(self, database, clock, monkeypatch):
        monkeypatch.setattr(retention, "WINDOW", 3)
        database.transaction_sync(resources.ensure, [f"k{n}" for n in range(7)])
        before, after, gone = clock.advance(days=1), "", []
        while after is not None:
            found, after = database.transaction_sync(retention.forget_idle, before, after)
            gone.append(found)
        assert gone == [3, 3, 1]

    def test_limits_that_nobody_declared_and_nobody_uses_any_more(self, database, clock, monkeypatch, read_all):
        database.transaction_sync(resources.ensure, ["a", "b", "c"])
        now = clock.now().timestamp()
        old, young = now - 3601, now - 3599
        states = {
            ("a", "~100/core"): LimitState(0.0, 3.0, old, old),
            ("a", "~100/more"): LimitState(0.0, 3.0, young, old),
            ("a", "~100/sent"): LimitState(0.0, 3.0, old, young),
            ("a", "~learnt"): LimitState(old),
            ("b", "~learnt"): LimitState(young),
            ("b", "~5/x"): LimitState(0.0, None, None, None),
            ("c", "declared"): LimitState(0.0, 3.0, old, old),
            ("gone", "~5/x"): LimitState(0.0, 3.0, old, old),
        }
        database.transaction_sync(limits.insert, list(states))
        database.transaction_sync(limits.write, [(*id_, state) for id_, state in states.items()])
        monkeypatch.setattr(retention, "WINDOW", 2)
        places, after = [], ""
        while after is not None:
            count, after = database.transaction_sync(retention.forget_idle, clock.now() - DAY, after)
            assert count == 0
            places.append(after)
        rows = read_all("SELECT resource_key, name FROM {rate_limit} ORDER BY resource_key, name")
        assert [(r["resource_key"], r["name"]) for r in rows] == [
            ("a", "~100/more"), ("a", "~100/sent"), ("b", "~learnt"), ("c", "declared"),
        ]  # fmt: skip
        assert places == ["", "b", None], "the first two go, then the rest, as often as there are some"

    def test_a_limit_that_is_being_drawn_is_passed_over(self, postgres_database, clock):
        postgres = postgres_database
        postgres.transaction_sync(resources.ensure, ["a"])
        postgres.transaction_sync(limits.insert, [("a", "~5/x"), ("a", "~6/y")])

        def drawing(c, d):
            d.run(c, "SELECT 1 FROM {rate_limit} WHERE name = '~5/x' FOR NO KEY UPDATE")
            postgres.transaction_sync(retention.forget_idle, clock.now() - DAY, "")

        postgres.transaction_sync(drawing)
        names = postgres.transaction_sync(lambda c, d: list(d.run(c, "SELECT name FROM {rate_limit}").scalars()))
        assert names == ["~5/x"]

    def test_a_forgotten_resource_comes_back_when_it_is_used(self, database, forget):
        database.transaction_sync(resources.ensure, ["a"])
        assert forget() == set()
        database.transaction_sync(resources.ensure, ["a"])
        assert database.transaction_sync(resources.read, ["a"])["a"].calm


def test_old_notes(database, clock, left):
    def put(c, d):
        for n, resolved in enumerate((None, clock.now(), clock.now() + 9 * DAY)):
            d.run(
                c,
                "INSERT INTO {alert} (fingerprint, name, subject, cause, count, first_at, last_at, resolved_at)"
                " VALUES (:f, 'n', 's', 'c', 1, :now, :now, :resolved_at)",
                {"f": str(n), "now": clock.now(), "resolved_at": resolved},
            )
            d.run(
                c,
                "INSERT INTO {schedule} (name, kind, next_at, updated_at, removed)"
                " VALUES (:name, 'k', :now, :now, :removed)",
                {"name": str(n), "now": clock.now(), "removed": n == 0},
            )

    database.transaction_sync(put)
    assert database.transaction_sync(retention.forget_notes, clock.now() + DAY) == 2
    assert (left("alert"), left("schedule")) == (2, 2)
