"""What an outcome says about each key of the request's path."""

import pytest

from resilient.core.evidence import child_of, judge
from resilient.core.failure import Failure, FailureKind, Scope

KEY = "github/acct/search"
K = FailureKind


@pytest.mark.parametrize(
    ("failure", "endpoint", "account", "provider"),
    [
        (None, "ok", "ok", "ok"),
        (Failure(K.TRANSIENT, status=503, provider_wide=True), "failed", "failed", "failed"),
        (Failure(K.TRANSIENT, provider_wide=True), "failed", "failed", "failed"),  # refused, timed out
        (Failure(K.AMBIGUOUS, status=504, provider_wide=True), "failed", "failed", "failed"),
        (Failure(K.TRANSIENT, status=425), "failed", "failed", "ok"),  # of the account; the provider answered
        (Failure(K.TRANSIENT), "failed", "failed", "neutral"),
        (Failure(K.TRANSIENT, scope=Scope.ENDPOINT, status=500), "failed", "neutral", "neutral"),
        (Failure(K.TRANSIENT, counts_for_breaker=False), "neutral", "neutral", "neutral"),  # our own pool
        (Failure(K.THROTTLED, status=429), "neutral", "neutral", "ok"),
        (Failure(K.THROTTLED, scope=Scope.ENDPOINT, status=429), "neutral", "ok", "ok"),
        (Failure(K.THROTTLED, scope=Scope.PROVIDER, status=429), "neutral", "neutral", "neutral"),
        (Failure(K.THROTTLED, status=503), "neutral", "neutral", "neutral"),
        (Failure(K.QUOTA, status=403), "neutral", "neutral", "ok"),
        (Failure(K.AUTH, status=401), "neutral", "neutral", "ok"),
        (Failure(K.PERMANENT, status=422), "ok", "ok", "ok"),
        (Failure(K.CONFLICT, status=409), "ok", "ok", "ok"),
        (Failure(K.PERMANENT, status=501), "neutral", "neutral", "neutral"),
        (Failure(K.PERMANENT), "neutral", "neutral", "neutral"),  # a bad certificate
        (Failure(K.TIMEOUT), "neutral", "neutral", "neutral"),
        (Failure(K.BUG), "neutral", "neutral", "neutral"),
        (Failure(K.PERMANENT, status=408), "neutral", "neutral", "neutral"),
    ],
)
def test_judge(failure, endpoint, account, provider):
    assert [judge(failure, KEY, level) for level in (KEY, "github/acct", "github")] == [
        endpoint,
        account,
        provider,
    ]


def test_a_failure_never_names_more_than_the_request_has():
    failure = Failure(K.TRANSIENT, scope=Scope.ACCOUNT)
    assert judge(failure, "github", "github") == "failed"


@pytest.mark.parametrize(("level", "child"), [(KEY, "."), ("github/acct", "search"), ("github", "acct")])
def test_child_of(level, child):
    assert child_of(KEY, level) == child
