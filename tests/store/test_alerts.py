"""Rows of alerts, and what the periodic rules see, on both databases."""

from datetime import UTC, datetime, timedelta
from threading import Barrier, Thread
from uuid import UUID, uuid4

import pytest

from resilient.core.alerts.rules import Finding
from resilient.core.jobs.outcomes import Transition
from resilient.store import alerts
from resilient.store.db import schema
from resilient.store.gates import resources, turns
from resilient.store.jobs import finishing
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.finishing import Finish

HOUR = timedelta(hours=1)
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def record(database, clock):
    def record(*findings, lasting=False):
        database.transaction_sync(alerts.record, findings, clock.now(), lasting=lasting)

    return record


@pytest.fixture
def tell(database, clock):
    def tell():
        told, _ = database.transaction_sync(alerts.to_tell, clock.now(), clock.now() - HOUR)
        return [(alert.subject, alert.count, new) for alert, new in told]

    return tell


@pytest.fixture
def resolve(database, clock):
    def resolve(names=("circuit_open",), after=timedelta(minutes=5), **options):
        over = database.transaction_sync(alerts.resolve, names, clock.now() - after, clock.now(), **options)
        return [alert.subject for alert in over]

    return resolve


def dead(subject="sync", count=1, **detail):
    return Finding("dead", subject, detail, ("bug",), count)


def circuit(subject="github"):
    return Finding("circuit_open", subject, {"until": "later"})


class TestTelling:
    def test_once_then_again_after_an_hour_with_the_count(self, record, tell, clock):
        record(dead(), dead("mail"))
        assert sorted(tell()) == [("mail", 1, True), ("sync", 1, True)]
        record(dead(count=41))
        assert tell() == []
        clock.advance(minutes=59)
        record(dead())
        assert tell() == []
        clock.advance(minutes=1)
        record(dead(count=2))
        assert tell() == [("sync", 45, False)]
        clock.advance(hours=9)
        assert tell() == []  # nothing more happened

    def test_a_condition_counts_once_and_is_repeated_while_it_lasts(self, record, tell, clock):
        told = []
        for _ in range(9):
            record(circuit(), lasting=True)
            told += tell()
            clock.advance(minutes=10)
        assert told == [("github", 1, True), ("github", 1, False)]

    def test_the_latest_detail_is_kept(self, record, database):
        record(dead(job="1", text="ä\u2028'\""))
        record(dead(job="2"))
        (alert,) = database.transaction_sync(alerts.page, resolved=False, limit=9)
        assert alert.detail == {"job": "2"}

    def test_one_that_only_a_newer_version_has_words_for_is_left_to_it(self, record, tell, database):
        """Telling it would fail, and with it every other alert: see docs/upgrading.md."""
        record(Finding("from_tomorrow", "crm/a", {}), dead("sync"))
        assert tell() == [("sync", 1, True)]
        assert {
            a.subject: a.told_at is None for a in database.transaction_sync(alerts.page, resolved=False, limit=9)
        } == {
            "crm/a": True,
            "sync": False,
        }

    def test_two_processes_tell_it_once(self, database_url, open_database, clock):
        databases = [open_database(database_url) for _ in range(3)]
        barrier, told = Barrier(3), []

        def notice(database):
            barrier.wait()

            def write(c, d):
                found = [dead(f"k{n}") for n in range(20)]
                alerts.record(c, d, found, clock.now(), lasting=False)
                return alerts.to_tell(c, d, clock.now(), clock.now() - HOUR)[0]

            told.extend(alert.subject for alert, _ in database.transaction_sync(write))

        threads = [Thread(target=notice, args=(d,)) for d in databases]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert sorted(told) == sorted(f"k{n}" for n in range(20))
        page = databases[0].transaction_sync(alerts.page, resolved=False, limit=99)
        assert {alert.count for alert in page} == {3}


class TestResolving:
    def test_what_was_not_found_for_a_while_is_over(self, record, tell, resolve, clock, database):
        record(circuit(), lasting=True)
        tell()
        clock.advance(minutes=4)
        record(circuit(), lasting=True)
        clock.advance(minutes=4)
        assert resolve() == []
        clock.advance(minutes=1)
        assert resolve() == ["github"]
        assert resolve() == []
        assert database.transaction_sync(alerts.page, resolved=False, limit=9) == []
        (alert,) = database.transaction_sync(alerts.page, resolved=True, limit=9)
        assert alert.resolved_at == clock.now()

    def test_only_of_these_names_and_never_what_the_caller_cannot_judge(self, record, tell, resolve, clock):
        record(circuit("a"), circuit("b"), lasting=True)
        record(dead())
        tell()
        clock.advance(hours=1)
        assert resolve(spare={("circuit_open", "a")}) == ["b"]

    def test_the_end_of_what_was_never_told_is_not_told(self, record, resolve, clock):
        record(circuit(), lasting=True)
        clock.advance(hours=1)
        assert resolve() == []

    def test_what_comes_back_is_news(self, record, tell, resolve, clock, database):
        record(circuit(), lasting=True)
        tell()
        clock.advance(minutes=6)
        resolve()
        clock.advance(minutes=1)
        record(circuit(), lasting=True)
        assert tell() == [("github", 1, True)]
        (alert,) = database.transaction_sync(alerts.page, resolved=False, limit=9)
        assert alert.first_at == clock.now()

    def test_events_count_anew(self, record, tell, resolve, clock):
        record(dead(count=5))
        tell()
        clock.advance(days=2)
        resolve(["dead"])
        record(dead(count=2))
        assert tell() == [("sync", 2, True)]


def test_in_a_schema(empty_url, open_database, backend, clock):
    if backend != "postgresql":
        return
    database = open_database(empty_url, schema="ours")
    schema.upgrade_sync(database)
    for _ in range(2):
        database.transaction_sync(alerts.record, [dead()], clock.now(), lasting=False)
    assert database.transaction_sync(alerts.page, resolved=False, limit=9)[0].count == 2


class TestSymptoms:
    @pytest.fixture
    def ended(self, database, clock):
        """Put jobs that ended just now: each well, or with a charged execution."""

        def ended(state, *keys, kind="sync", charged=True, error_kind="transient"):
            def write(c, d):
                for key in keys:
                    id_ = uuid4()
                    jobs.insert(c, d, [jobs.NewJob(id=id_, kind=kind, resource_key=key, payload="1")])
                    d.run(
                        c,
                        "UPDATE {job} SET state = :state, finished_at = :now, last_error_kind = :kind WHERE id = :id",
                        {"state": state, "now": clock.now(), "id": d.id(id_), "kind": error_kind},
                    )
                    if state != "succeeded":
                        history = Finish(id_, 1, Transition(state, "dead", charged=charged), execution=1)
                        finishing.record_attempts(c, d, [history], clock.now())

            database.transaction_sync(write)

        return ended

    def executions(self, database, clock, volume=1):
        since = clock.now() - timedelta(minutes=10)
        return database.transaction_sync(alerts.executions, since, volume)

    def test_executions_of_the_window(self, database, clock, ended):
        ended("succeeded", "old/1")
        ended("dead", "old/1")
        clock.advance(minutes=11)
        ended("succeeded", "a/1", "a/1")
        ended("dead", "a/2", kind="push")
        ended("dead", "a/3", charged=False)
        assert self.executions(database, clock) == ([("sync", "a/1")] * 2, [("push", "a/2")])
        assert self.executions(database, clock, volume=2) == ([], [])

    def test_both_samples_cover_the_same_time(self, database, clock, ended, monkeypatch):
        monkeypatch.setattr(alerts, "EXECUTIONS", 4)
        ended("dead", "early/1", "early/2")
        clock.advance(60)
        ended("succeeded", *["late/1"] * 4)
        ended("dead", "late/2")
        assert self.executions(database, clock) == ([("sync", "late/1")] * 4, [("sync", "late/2")])
        clock.advance(60)
        ended("dead", *["last/1"] * 4)
        assert self.executions(database, clock) == ([], [("sync", "last/1")] * 4)

    def test_notes_of_new_operations_push_no_failure_out(self, database, clock, ended, monkeypatch):
        monkeypatch.setattr(alerts, "EXECUTIONS", 4)
        ended("succeeded", *["a/1"] * 4)
        ended("dead", "a/2", "a/2")
        ids = database.transaction_sync(lambda c, d: [UUID(str(i)) for (i,) in d.run(c, "SELECT id FROM {job}")])
        clock.advance(1)
        for decision in ("retried", "once_more"):
            database.transaction_sync(finishing.note_decision, ids, decision, clock.now())
        assert self.executions(database, clock) == ([("sync", "a/1")] * 4, [("sync", "a/2")] * 2)

    def test_deaths_nobody_saw(self, database, clock, ended):
        start = clock.now()
        ended("dead", "a/1", error_kind="expired")
        clock.advance(30)
        looked_at = clock.now()
        ended("dead", "a/1", "a/2", error_kind="expired")
        ended("dead", "a/1", kind="mail", error_kind="lost_worker")
        ended("dead", "a/1", error_kind="permanent")
        clock.advance(30)
        found = database.transaction_sync(alerts.swept, looked_at, clock.now())
        assert [row[:3] for row in found] == [("mail", "lost_worker", 1), ("sync", "expired", 2)]
        assert [row[2] for row in database.transaction_sync(alerts.swept, start, looked_at)] == [1]
        (job,) = _read(database, "SELECT id, kind FROM {job} WHERE kind = 'mail'")
        assert str(UUID(str(job["id"]))) == found[0][3]

    def test_stopped_resources(self, database):
        database.transaction_sync(resources.ensure, ["a", "b", "c", "d", "e"])

        def stop(c, d):
            d.run(c, "UPDATE {resource} SET breaker = 'open', opened_at = :now WHERE key = 'a'", {"now": NOON})
            d.run(c, "UPDATE {resource} SET auth = 'needs_reauth' WHERE key = 'b'")
            d.run(c, "UPDATE {resource} SET breaker = 'isolated' WHERE key = 'c'")
            d.run(c, "UPDATE {resource} SET blocked_until = :until WHERE key = 'd'", {"until": NOON + 48 * HOUR})
            d.run(c, "UPDATE {resource} SET blocked_until = :until WHERE key = 'e'", {"until": NOON + HOUR})

        database.transaction_sync(stop)
        rows = database.transaction_sync(alerts.stopped, NOON + 24 * HOUR)
        assert [row["key"] for row in rows] == ["a", "b", "d"]
        assert (rows[0]["opened_at"], rows[2]["blocked_until"]) == (NOON, NOON + 48 * HOUR)

    def test_who_waits_though_nothing_stops_it(self, database, clock):
        waits, stopped = uuid4(), uuid4()

        def put(c, d):
            jobs.insert(c, d, [jobs.NewJob(id=waits, kind="k", resource_key="a/1", payload="1")])
            jobs.insert(c, d, [jobs.NewJob(id=stopped, kind="k", resource_key="b/1", payload="1")])
            jobs.insert(c, d, [jobs.NewJob(id=uuid4(), kind="k", resource_key="c/1", payload="1", delay=60)])
            turns.insert(c, d, {"gone/1": 0})
            d.run(c, "UPDATE {turn} SET parked_on = 'b', recheck_at = :now WHERE resource_key = 'b/1'", {"now": NOON})

        database.transaction_sync(put)
        clock.advance(hours=2)
        assert database.transaction_sync(alerts.waiting) == [("a/1", str(waits), NOON)]


def _read(database, sql):
    return database.transaction_sync(lambda c, d: [dict(r._mapping) for r in d.run(c, sql)])
