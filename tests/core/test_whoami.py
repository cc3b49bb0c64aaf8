"""What a test request, an erasure and a line of the audit say, word for word."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from resilient.core.base.budgets import Budget
from resilient.core.base.errors import BadResourceKey, FailureKind, InvalidInput
from resilient.core.inspect.erasure import Erased, checked, refusal
from resilient.core.inspect.whoami import RequestTest, lessons_of
from resilient.core.jobs.records import AuditInfo, Count, ResourceInfo

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
LEARNT = {"kind": "rate", "rate": 4.8, "at": NOW - timedelta(minutes=1), "throttles": 3}
WELL = ResourceInfo(
    key="github/a", gate=None, code=None, since=None, until=None, breaker="closed", reopens=0, probe_owner=None,
    blocked_until=None, paused_at=None, paused_reason=None, auth="ok", policy=None, learnt=None, last_error=None,
    last_error_kind=None, last_error_code=None, last_error_at=None, last_success_at=None, created_at=NOW,
    waiting=Count(0), running=0,
)  # fmt: skip
IDS = [UUID(int=n) for n in range(1, 5)]


def changed(**fields):
    known = {name: getattr(WELL, name) for name in WELL.__slots__}
    return ResourceInfo(**known | fields)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({}, {}, None),
        ({}, {"breaker": "half_open"}, "The circuit of github/a is half open; it was closed."),
        ({"breaker": "half_open"}, {"breaker": "open"}, "The circuit of github/a is open; it was half open."),
        (None, {"breaker": "open"}, None),  # nobody had met it: that is no change
        (
            {},
            {"blocked_until": NOW + timedelta(seconds=5)},
            "github/a waits until 12:00:05 UTC (in 5 s), as the provider asks.",
        ),
        ({}, {"blocked_until": NOW}, None),  # over
        ({}, {"auth": "needs_reauth"}, "The credentials of github/a are needs reauth; they were ok."),
        ({"auth": "needs_reauth"}, {}, "The credentials of github/a are ok; they were needs reauth."),
        (None, {"auth": "needs_reauth"}, None),
        (
            {},
            {"learnt": LEARNT},
            "github/a has a limit of 4.8/s, learnt at 11:59:00 UTC (1 min ago) from 3 throttles.",
        ),
        (
            None,
            {"learnt": LEARNT},
            "github/a has a limit of 4.8/s, learnt at 11:59:00 UTC (1 min ago) from 3 throttles.",
        ),
        ({"learnt": LEARNT}, {"learnt": LEARNT}, None),
        ({"learnt": LEARNT}, {}, None),
    ],
)
def test_what_the_gates_learnt(before, after, says):
    known = {} if before is None else {"github/a": changed(**before)}
    assert lessons_of(known, {"github/a": changed(**after)}, [], NOW) == (() if says is None else (says,))


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (Budget("core"), None),
        (Budget("core", remaining=0.0), "Of its limit 'core' 0 are left."),
        (Budget("core", 5_000, 4_999.5), "Of its limit 'core' 4,999.5 of 5,000 are left."),
        (
            Budget("core", 60, 7, NOW + timedelta(minutes=2)),
            "Of its limit 'core' 7 of 60 are left, full again 12:02:00 UTC (in 2 min).",
        ),
    ],
)
def test_what_is_left(budget, says):
    assert lessons_of({}, {}, [budget], NOW) == (() if says is None else (says,))


def test_a_test_request_for_programs():
    parts = {
        "key": "github/a", "request": "GET /user", "status": 401, "seconds": 0.5, "failure": FailureKind.AUTH,
        "code": "bad_token", "probe": False, "lessons": ("One.",),
    }  # fmt: skip
    assert RequestTest(**parts).to_json() == parts | {"failure": "auth", "lessons": ["One."]}


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("github", "'github' is a provider, with all of its accounts: name one account, such as github/acct-7"),
        ("outbox/crm", "'outbox/crm' is a destination of events, and no account: `resilient prune` deletes events"),
    ],
)
def test_what_is_no_account_is_not_erased(key, says):
    with pytest.raises(InvalidInput) as caught:
        checked(key)
    assert str(caught.value) == says
    with pytest.raises(BadResourceKey):
        checked(f"{key}/a b")


@pytest.mark.parametrize("key", ["github/a", "github/a/search", "a/outbox"])
def test_an_account_and_what_is_below_it_can_be_erased(key):
    assert checked(key) == key


def test_what_stands_in_the_way_of_an_erasure():
    one, two, three, _ = IDS
    assert refusal("github/a", [], []) is None
    assert refusal("github/a", IDS, [one]) == (
        f"jobs of github/a are running ({one}, {two}, {three}): wait for them (timeout=, --wait), or cancel them first"
    )
    assert refusal("github/a", [], IDS) == (
        f"workflows with steps of github/a are not over ({one}, {two}, {three}): wait for them, or cancel them first"
    )


def test_an_erasure_for_programs():
    erased = Erased("github/a", {"jobs": 3, "attempts": 4}, dry_run=True)
    assert erased.total == 7
    assert erased.to_json() == {"resource_key": "github/a", "rows": {"jobs": 3, "attempts": 4}, "dry_run": True}
    assert Erased("github/a").to_json() == {"resource_key": "github/a", "rows": {}, "dry_run": False}


def test_a_line_of_the_audit_for_programs():
    line = AuditInfo(7, NOW, "ann", "dashboard", "jobs retry", "mail.send", None, {"changed": 1})
    assert line.to_json() == {
        "id": 7, "at": "2030-01-01T12:00:00.000Z", "who": "ann", "via": "dashboard", "action": "jobs retry",
        "subject": "mail.send", "why": None, "outcome": {"changed": 1},
    }  # fmt: skip
