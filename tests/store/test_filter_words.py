"""The filter of jobs: its words, and the conditions that PostgreSQL is given."""

import re
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from resilient import InvalidInput, JobFilter
from resilient.store.db.dialect import Dialect
from resilient.store.jobs.filters import GOING, conditions, matches, within

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
KEY = sa.column("key", sa.String)


def text(condition):
    """The condition as PostgreSQL's SQL, values put in."""
    sql = str(condition.compile(dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True}))
    return sql.replace("%%", "%").replace("\\\\", "\\")  # SQLAlchemy 2.0.40 writes two backslashes for one


@pytest.mark.parametrize(
    ("criteria", "says"),
    [
        ({"colour": "red"}, "there is no filter 'colour': use one of created_after, created_before, error_code, "),
        ({"state": "done"}, "'done' is not a job state: use one of blocked, scheduled, ready, running, "),
        ({"error_kind": "odd"}, "'odd' is not a kind of error: use one of throttled, quota, "),
        (
            {"struggling": True, "state": ["dead", "cancelled"]},
            "struggling jobs are still going: leave out state=dead, cancelled",
        ),
        ({"kind": ["a", "b\0"]}, "kind has a character that no database stores (NUL, half a pair): 'b\\x00'"),
        ({"error_code": [None, "\0"]}, "error_code has a character that no database stores"),
        ({"unique_key": "a\ud800"}, "unique_key has a character that no database stores"),
        ({"text": "\0"}, "text has a character that no database stores"),
        ({"tags": {"a": "\0"}}, "tags has a character that no database stores (NUL, half a pair): 'a=\\x00'"),
    ],
)
def test_a_wrong_word_is_named_with_those_that_there_are(criteria, says):
    with pytest.raises(InvalidInput, match=f"^{re.escape(says)}"):
        JobFilter.of(criteria)


def test_struggling_means_states_that_go_on():
    assert JobFilter.of({"struggling": True}).state == tuple(map(str, GOING))
    assert JobFilter.of({"struggling": True, "state": ["dead", "ready"]}).state == ("ready",)


def test_states_are_narrowed_to_those_that_are_allowed():
    assert JobFilter.of({"state": ["dead", "ready"]}).with_states(["ready", "running"]).state == ("ready",)
    assert JobFilter.of({"state": "dead"}).with_states(["ready"]).state == ()
    assert JobFilter.of({}).with_states(["ready", "running"]).state == ("ready", "running")


def test_a_filter_without_an_age_is_itself():
    f = JobFilter.of({"created_after": NOW})
    assert f.at(NOW) is f
    assert JobFilter.of({"run_after": timedelta(hours=1)}).at(NOW).run_after == NOW - timedelta(hours=1)


def test_all_criteria_count_beside_those_that_struggle():
    f = JobFilter.of({"struggling": True, "kind": "mail.send", "within": "crm/a"})
    sql = " AND ".join(text(one) for one in conditions(f, Dialect("postgresql")))
    assert all(word in sql for word in ("mail.send", "crm/a", "attempts > 0", "finished_at IS NULL"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], "resilient_job.last_error_code = 'a'"),
        (["a", "b"], "resilient_job.last_error_code IN ('a', 'b')"),
        ([None], "resilient_job.last_error_code IS NULL"),
        (["a", None], "resilient_job.last_error_code = 'a' OR resilient_job.last_error_code IS NULL"),
    ],
)
def test_one_word_is_compared_and_several_are_listed(words, expected):
    (condition,) = conditions(JobFilter.of({"error_code": words}), Dialect("postgresql"))
    assert text(condition) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("crm/a", "key = 'crm/a'"),
        ("crm/**", "key > 'crm/' AND key < 'crm0'"),
        ("crm/*", r"key LIKE 'crm/%' ESCAPE '\' AND key NOT LIKE '%/%/%' AND key >= 'crm/' AND key < 'crm/~'"),
        (
            "crm/a_?",
            r"key LIKE 'crm/a\__' ESCAPE '\' AND key NOT LIKE '%/%/%' AND key >= 'crm/a_' AND key < 'crm/a_~'",
        ),
        ("*/x", r"key LIKE '%/x' ESCAPE '\' AND key NOT LIKE '%/%/%'"),
    ],
)
def test_a_pattern_is_a_range_or_a_pattern_of_the_servers(pattern, expected):
    assert text(matches(KEY, pattern, Dialect("postgresql"))) == expected


def test_a_subtree_is_a_range_of_the_index():
    assert text(within(KEY, "crm/a")) == "key >= 'crm/a' AND key < 'crm/a0' AND (key = 'crm/a' OR key > 'crm/a/')"


@pytest.mark.parametrize(("pattern", "depth"), [("*/**", 3), ("a*/b/**", 2), ("a/b/c/*/**", 0)])
def test_everything_below_a_pattern_goes_as_deep_as_a_key_may(pattern, depth):
    sql = text(matches(KEY, pattern, Dialect("postgresql")))
    assert sql.count(" NOT LIKE ") == depth
