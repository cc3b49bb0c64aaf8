"""Pages, bounded counts and histories."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from uuid import UUID

import pytest
import sqlalchemy as sa

from resilient import Count, InvalidInput, JobFilter, JobNotFound, JobState
from resilient.store import events
from resilient.store.db.dialect import Dialect
from resilient.store.jobs import queries
from resilient.store.jobs.filters import JOB
from resilient.store.jobs.queries import ATTEMPT

T0 = datetime(2030, 1, 1, 12, tzinfo=UTC)
ALL = JobFilter()
SPOIL = "UPDATE {job} SET payload = :text WHERE id = :id"


def number(n):
    return UUID(int=(7 << 76) | (2 << 62) | n)


def put(database, states):
    def run(c, d):
        for n, state in enumerate(states, 1):
            row = {
                "id": number(n),
                "kind": "mail.send",
                "resource_key": "github/a",
                "payload": {"n": n},
                "state": state,
                "run_at": T0,
                "created_at": T0,
                "updated_at": T0,
                "finished_at": T0 if state == "dead" else None,
            }
            d.execute(c, sa.insert(JOB).values(**row))

    database.transaction_sync(run)


def pages(database, f, size, order):
    seen, after = [], None
    while page := database.transaction_sync(queries.page, f, limit=size, after=after, order=order):
        assert len(page) <= size
        seen += [j.id.int & 0xFFFF for j in page]
        after = page[-1].id
    return seen


@pytest.mark.parametrize("f", [ALL, JobFilter(state=("ready", "dead"))])
def test_pages_join_without_gap_or_repeat(database, f):
    put(database, ["ready", "dead", "ready", "ready", "dead", "ready", "dead"])
    assert pages(database, f, 3, "oldest") == [1, 2, 3, 4, 5, 6, 7]
    assert pages(database, f, 2, "newest") == [7, 6, 5, 4, 3, 2, 1]


def test_a_job_that_has_ended_and_is_deleted_while_it_is_read_has_ended(database, monkeypatch):
    put(database, ["dead", "ready"])
    execute, statements = Dialect.execute, count()

    def deleted_in_between(self, c, statement, params=None):
        if next(statements) == 1:
            execute(self, c, sa.delete(JOB).where(JOB.c.id == number(1)))
        return execute(self, c, statement, params)

    monkeypatch.setattr(Dialect, "execute", deleted_in_between)
    ended = database.transaction_sync(queries.over, [number(1), number(2), number(3)])
    assert {id_: info and info.state for id_, info in ended.items()} == {number(1): JobState.DEAD, number(3): None}


def test_an_event_whose_text_is_no_json_hides_no_other_of_its_type(sqlite_database):
    """Written by hand: PostgreSQL takes no such text."""
    put(sqlite_database, ["ready", "ready"])
    for n, text in ((1, '{"type": "a"}'), (2, "{oops")):
        values = {"text": text, "id": number(n).hex}
        sqlite_database.transaction_sync(lambda c, d, v=values: d.run(c, SPOIL, v))
    page = sqlite_database.transaction_sync(events.page, ALL, types=["a"])
    assert [one.id for one in page] == [number(1)]


@pytest.mark.parametrize("limit", [0, -1, 10_001])
def test_a_page_has_a_sane_size(database, limit):
    with pytest.raises(InvalidInput, match=f"limit={limit}: ask for 1 to 10000"):
        database.transaction_sync(queries.page, ALL, limit=limit)


def test_counting_stops_at_the_bound(database):
    put(database, ["ready"] * 5 + ["dead"] * 3)
    exact = database.transaction_sync(queries.count, ALL, limit=8)
    assert (exact, exact.more, str(exact)) == (8, False, "8")
    for f in (ALL, JobFilter(state=("ready", "dead"))):
        capped = database.transaction_sync(queries.count, f, limit=7)
        assert (capped, capped.more, f"{capped}") == (7, True, "7+")
    assert database.transaction_sync(queries.count, JobFilter(state=("running",))) == Count(0)


def test_one_job_with_everything_about_it(database):
    put(database, ["ready"])
    job = database.transaction_sync(queries.get, number(1))
    assert (job.state, job.payload, job.run_at) == (JobState.READY, {"n": 1}, T0)
    assert job.to_json()["run_at"] == "2030-01-01T12:00:00.000Z"
    assert job.to_json()["id"] == str(number(1))
    assert database.transaction_sync(queries.get, number(2)) is None
    with pytest.raises(JobNotFound, match=str(number(2))):
        database.transaction_sync(queries.require, number(2))


def test_the_latest_attempts_oldest_first(database):
    def run(c, d):
        for n in range(1, 6):
            row = {
                "job_id": number(1),
                "execution": n,
                "finished_at": T0,
                "decision": "retry",
                "charged": True,
            }
            d.execute(c, sa.insert(ATTEMPT).values(**row))
        row = {"job_id": number(2), "execution": 9, "finished_at": T0, "decision": "retry", "charged": True}
        d.execute(c, sa.insert(ATTEMPT).values(**row))
        return queries.attempts(c, d, number(1), limit=3)

    assert [a.execution for a in database.transaction_sync(run)] == [3, 4, 5]
