"""The filter of jobs means the same as its words, on both databases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from resilient import BadResourceKey, InvalidInput, JobFilter, NaiveDatetime
from resilient.core.base import resource_key
from resilient.store.jobs import queries
from resilient.store.jobs.filters import JOB

T0 = datetime(2030, 1, 1, 12, tzinfo=UTC)


def number(n):
    return UUID(int=(7 << 76) | (2 << 62) | n)


def put(database, *jobs):
    """Insert rows as given; ids count up."""

    def run(c, d):
        for n, job in enumerate(jobs, 1):
            row = {
                "id": number(n),
                "kind": "mail.send",
                "resource_key": "github/a",
                "state": "ready",
                "run_at": T0,
                "created_at": T0,
                "updated_at": T0,
            } | job
            d.execute(c, sa.insert(JOB).values(**row))

    database.transaction_sync(run)


def found(database, **criteria):
    """The numbers of the jobs that fit, oldest first."""
    f = JobFilter.of(criteria)
    jobs = database.transaction_sync(queries.page, f, order="oldest")
    assert database.transaction_sync(queries.count, f) == len(jobs)
    return [j.id.int & 0xFFFF for j in jobs]


def test_by_state_one_or_several(database):
    put(
        database,
        {},
        {"state": "dead", "finished_at": T0},
        {"state": "running"},
        {"state": "succeeded", "finished_at": T0},
    )
    assert found(database, state="dead") == [2]
    assert found(database, state=["dead", "ready"]) == [1, 2]
    assert found(database, state=("succeeded", "running", "blocked")) == [3, 4]
    assert found(database) == [1, 2, 3, 4]


def test_by_kind_unique_key_worker_and_id(database):
    put(
        database,
        {},
        {"kind": "issues.sync", "unique_key": "u"},
        {"kind": "x", "locked_by": "w1", "state": "running"},
    )
    assert found(database, kind="issues.sync") == [2]
    assert found(database, kind=["issues.sync", "x"]) == [2, 3]
    assert found(database, unique_key="u") == [2]
    assert found(database, worker="w1") == [3]
    assert found(database, ids=[number(1), str(number(3)), number(99)]) == [1, 3]
    assert found(database, ids=[]) == []


def test_none_means_jobs_without_an_error_kind_or_code(database):
    put(
        database,
        {"last_error_kind": "bug", "last_error_code": "none"},
        {"last_error_kind": "bug"},
        {"last_error_code": "x"},
    )
    assert found(database, error_code=[None]) == [2]
    assert found(database, error_kind=[None]) == [3]
    assert found(database, error_code=[None, "none"]) == [1, 2]
    assert found(database, error_kind=["bug"], error_code=[None]) == [2]


def test_by_error_kind_code_and_text(database):
    put(
        database,
        {"last_error_kind": "permanent", "last_error_code": "http_422", "last_error": "No 100% Match_Here"},
        {"last_error_kind": "bug", "last_error": "KeyError"},
        {},
    )
    assert found(database, error_kind="permanent") == [1]
    assert found(database, error_kind=["permanent", "bug"]) == [1, 2]
    assert found(database, error_code="http_422") == [1]
    assert found(database, text="100% match_h") == [1]
    assert found(database, text="100x") == []
    assert found(database, text="%") == [1]


def test_those_that_struggle_have_used_attempts_and_go_on(database):
    ended = {"attempts": 2, "finished_at": T0}
    put(
        database,
        {},
        {"attempts": 1},
        {"attempts": 3, "state": "scheduled"},
        {"attempts": 2, "state": "running"},
        {**ended, "state": "dead"},
        {**ended, "state": "succeeded"},
        {"executions": 4, "deferrals": 4},
    )
    assert found(database, struggling=True) == [2, 3, 4]
    assert found(database, struggling=True, state=["scheduled", "dead"]) == [3]
    assert found(database, struggling=False) == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(InvalidInput, match="struggling jobs are still going: leave out state=dead"):
        found(database, struggling=True, state="dead")


def test_by_tags_all_must_fit(database):
    put(database, {"tags": {"user": "7", "team": "a"}}, {"tags": {"user": "7"}}, {"tags": {"u'\"x": "7"}}, {})
    assert found(database, tags={"user": "7"}) == [1, 2]
    assert found(database, tags={"user": "7", "team": "a"}) == [1]
    assert found(database, tags={"user": "8"}) == []
    assert found(database, tags={"u'\"x": "7"}) == [3]


def test_by_time_as_moment_or_as_ago(clock, database):
    clock.set(T0)
    hours = [timedelta(hours=-n) for n in (0, 1, 2)]
    put(
        database,
        *({"created_at": T0 + h, "run_at": T0 + 2 * h, "state": "dead", "finished_at": T0 + h} for h in hours),
    )
    assert found(database, created_after=T0 - timedelta(hours=1)) == [1, 2]
    assert found(database, created_before=T0 - timedelta(hours=1)) == [3]
    assert found(database, finished_after=timedelta(minutes=90), state="dead") == [1, 2]
    assert found(database, finished_before=timedelta(minutes=90)) == [3]
    assert found(database, run_after=timedelta(hours=3), run_before=T0) == [2]


KEYS = [
    "a", "b", "a/x", "a/y", "a/x-1", "a/x/s", "a/x/s/t", "a/x/u", "a/y/s", "a/x_/s", "a.b", "a-b/x", "A/x", "a0",
    "ab/c",
]  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        "a",
        "a/*",
        "a/x*",
        "a/?",
        "a/x_*/s",
        "*/x",
        "*",
        "a/**",
        "a*/**",
        "*/x/**",
        "a/x/s/t/**",
        "a/*/s",
        "a?b",
        "A/**",
        "?",
    ],
)
def test_patterns_mean_what_policies_mean_by_them(database, pattern):
    put(database, *({"resource_key": key} for key in KEYS))
    assert found(database, resource=pattern) == [
        n for n, key in enumerate(KEYS, 1) if resource_key.matches(key, pattern)
    ]


def test_several_patterns_and_a_subtree(database):
    put(database, *({"resource_key": key} for key in KEYS))
    keys = [KEYS[n - 1] for n in found(database, within="a/x")]
    assert keys == ["a/x", "a/x/s", "a/x/s/t", "a/x/u"]
    assert [KEYS[n - 1] for n in found(database, resource=["b", "a/?"])] == ["b", "a/x", "a/y"]


@pytest.fixture(scope="module")
def match_in_sqlite():
    from resilient.store.db.dialect import Dialect
    from resilient.store.jobs.filters import matches

    d, c = Dialect("sqlite"), sa.create_engine("sqlite://").connect()
    yield lambda key, pattern: bool(c.execute(sa.select(matches(sa.literal(key), pattern, d))).scalar_one())
    c.close()


_SEGMENT = st.text("ab_*?", min_size=1, max_size=3)
_PATTERN = st.lists(_SEGMENT, min_size=1, max_size=4).map("/".join)


@given(
    key=st.lists(st.text("ab_", min_size=1, max_size=3), min_size=1, max_size=4).map("/".join),
    pattern=_PATTERN | _PATTERN.map(lambda p: p + "/**"),
)
def test_any_pattern_means_what_policies_mean_by_it(match_in_sqlite, key, pattern):
    assert match_in_sqlite(key, pattern) == resource_key.matches(key, pattern)


@pytest.mark.parametrize(
    ("criteria", "error", "says"),
    [
        ({"state": "failed"}, InvalidInput, "'failed' is not a job state: use one of blocked, scheduled"),
        ({"resource": "a b"}, BadResourceKey, "'a b' is not a resource pattern"),
        ({"within": "a/*"}, BadResourceKey, "'a/*' is not a resource key"),
        ({"ids": ["nine"]}, InvalidInput, "'nine' is not a job id"),
        (
            {"created_after": datetime(2030, 1, 1)},  # noqa: DTZ001
            NaiveDatetime,
            "created_after=2030-01-01T00:00:00 has no time zone",
        ),
        ({"colour": "red"}, InvalidInput, "there is no filter 'colour': use one of"),
    ],
)
def test_a_wrong_filter_is_refused_by_name(criteria, error, says):
    with pytest.raises(error, match=says.replace("*", r"\*").replace("(", r"\(")):
        JobFilter.of(criteria)
