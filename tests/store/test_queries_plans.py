"""Which index serves which question, on a table with many finished jobs and a backlog."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import event

from resilient import Count, JobFilter
from resilient.store.inspect import resources as resource_queries
from resilient.store.inspect import why
from resilient.store.jobs import queries

T0 = datetime(2030, 1, 1, 12, tzinfo=UTC)
JOBS = 30_000


COLUMNS = "id, kind, resource_key, state, run_at, created_at, updated_at, finished_at, tags"
STATE = """CASE WHEN n % 10 > 0 THEN 'succeeded' WHEN n / 10 % 5 = 0 THEN 'ready' WHEN n / 10 % 5 = 1 THEN 'scheduled'
    WHEN n / 10 % 5 = 2 THEN 'running' ELSE 'dead' END"""
FINISHED = "CASE WHEN n % 10 > 0 OR n / 10 % 5 > 2 THEN at END"
POSTGRESQL_FILL = f"""INSERT INTO resilient_job ({COLUMNS})
    SELECT (lpad(to_hex(n), 12, '0') || '70008' || lpad('', 15, '0'))::uuid, 'kind.' || (n % 7),
        'github/acct-' || (n % 1000 / 10), {STATE}, at, at, at, {FINISHED}, jsonb_build_object('user', (n % 3000)::text)
    FROM (SELECT n, timestamptz '2030-01-01 12:00Z' + n * interval '1 second' AS at
        FROM generate_series(1, {JOBS}) n) s"""
SQLITE_FILL = f"""INSERT INTO resilient_job ({COLUMNS})
    WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < {JOBS}),
    s AS (SELECT n, strftime('%Y-%m-%d %H:%M:%S.000000', '2030-01-01 12:00:00', '+' || n || ' seconds') AS at FROM r)
    SELECT printf('%012x70008000000000000000', n), 'kind.' || (n % 7), 'github/acct-' || (n % 1000 / 10),
        {STATE}, at, at, at, {FINISHED}, json_object('user', CAST(n % 3000 AS TEXT)) FROM s"""


@pytest.fixture
def full(database):
    """Nine of ten jobs succeeded; the others wait, run or are dead, over 100 accounts."""

    def fill(c, d):
        c.exec_driver_sql(POSTGRESQL_FILL.replace("%", "%%") if d.is_postgresql else SQLITE_FILL)
        c.exec_driver_sql("ANALYZE")

    database.transaction_sync(fill)
    return database


@pytest.fixture
def plan(full):
    """The plan of the statements that a store function runs, as text."""

    def explain(fn, *args, **kwargs):
        seen = []

        def run(c, d):
            @event.listens_for(c, "before_cursor_execute")
            def _(_c, cursor, statement, parameters, _context, _many):
                prefix = "EXPLAIN " if d.is_postgresql else "EXPLAIN QUERY PLAN "
                if "clock_timestamp" not in statement:
                    cursor.execute(prefix + statement, parameters)
                    seen.extend(str(row) for row in cursor.fetchall())

            return fn(c, d, *args, **kwargs)

        full.transaction_sync(run)
        return "\n".join(seen)

    return explain


QUESTIONS = [
    ({"state": "ready", "resource": "github/acct-9"}, "resilient_job_ready"),
    ({"state": "ready", "within": "github/acct-9"}, "resilient_job_ready"),
    ({"state": "ready", "resource": "github/acct-9*"}, "resilient_job_ready"),
    ({"state": "running", "resource": "github/acct-9"}, "resilient_job_running"),
    ({"state": "dead", "finished_after": T0 + timedelta(seconds=JOBS - 500)}, "resilient_job_finished"),
    ({"state": "scheduled", "run_before": T0 + timedelta(seconds=500)}, "resilient_job_due"),
]


@pytest.mark.parametrize(("criteria", "index"), QUESTIONS)
def test_pages_and_counts_use_the_index_of_their_state(plan, criteria, index):
    f = JobFilter.of(criteria)
    for text in (plan(queries.page, f), plan(queries.count, f)):
        assert index in text
        assert "Seq Scan" not in text


def test_several_states_use_the_index_of_each(plan):
    f = JobFilter.of({"state": ["ready", "running"], "resource": "github/acct-9"})
    text = plan(queries.count, f)
    assert "resilient_job_ready" in text
    assert "resilient_job_running" in text


def test_the_newest_of_all_and_a_job_by_its_id_use_the_primary_key(plan, full):
    for text in (plan(queries.page, JobFilter()), plan(queries.get, UUID(int=5))):
        assert "resilient_job_pkey" in text or "sqlite_autoindex_resilient_job_1" in text


def test_tags_use_their_index_on_postgresql(plan, full):
    text = plan(queries.page, JobFilter.of({"tags": {"user": "77"}}))
    assert not full.dialect.is_postgresql or "resilient_job_tags" in text


def test_what_waits_and_what_is_ahead_use_the_line(plan, full):
    text = plan(resource_queries.waiting, ["github/acct-9", "github"])
    assert "resilient_job_ready" in text
    job = full.transaction_sync(queries.page, JobFilter.of({"state": "ready"}), limit=1)[0]
    text = plan(why.ahead_of, job)
    assert "resilient_job_ready" in text
    assert full.transaction_sync(why.ahead_of, job) == Count(29)
