"""What an outcome says about each key of the request's path."""

from dataclasses import replace

import pytest

from resilient.core.base.errors import Failure, FailureKind, Scope
from resilient.core.gates.breaker import child_of, judge, names, scoped
from resilient.core.gates.policy import Tenancy, tenancy_of

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


@pytest.mark.parametrize(
    ("address", "tenancy"),
    [
        ("", Tenancy.SHARED),
        ("https://api.example.com/v1", Tenancy.SHARED),
        ("https://api.example.com/{account}/v1", Tenancy.SHARED),
        ("https://{shop}.example.com/api/{version}", Tenancy.SUBDOMAIN),
        ("https://{service}.{region}.example.com", Tenancy.SUBDOMAIN),
        ("https://{shop}.com/api", Tenancy.APART),
        ("https://{homeserver}/client", Tenancy.APART),
        ("https://{homeserver}:8448/client", Tenancy.APART),
        ("https://api.{domain}", Tenancy.APART),
        ("{instance_url}/services", Tenancy.APART),
    ],
)
def test_whose_host_it_is(address, tenancy):
    assert tenancy_of(address) is tenancy


def test_a_host_that_the_facts_list_is_the_providers():
    assert tenancy_of("{instance_url}/services", confined=True) is Tenancy.SUBDOMAIN


NO_ANSWER = Failure(K.TRANSIENT, code="connect", provider_wide=True)
OUTAGE = Failure(K.TRANSIENT, status=503, provider_wide=True)
REST = Failure(K.THROTTLED, scope=Scope.PROVIDER, status=429)


@pytest.mark.parametrize(
    ("tenancy", "no_answer", "outage", "rest"),
    [
        (Tenancy.SHARED, "failed", "failed", "neutral"),
        (Tenancy.SUBDOMAIN, "neutral", "failed", "neutral"),
        (Tenancy.APART, "neutral", "neutral", "ok"),  # it answered: alive, and that is all it can say
    ],
)
def test_what_an_accounts_own_host_says_about_the_root(tenancy, no_answer, outage, rest):
    said = {failure: judge(failure, KEY, "github", tenancy) for failure in (NO_ANSWER, OUTAGE, REST)}
    assert list(said.values()) == [no_answer, outage, rest]
    assert judge(NO_ANSWER, KEY, "github/acct", tenancy) == judge(OUTAGE, KEY, KEY, tenancy) == "failed"
    assert judge(OUTAGE, "github", "github", tenancy) == "failed"  # work on the root's own key
    assert judge(replace(NO_ANSWER, scope=Scope.ENDPOINT), KEY, "github/acct", tenancy) == "failed", "its own host"


def test_a_told_time_binds_what_the_failure_names():
    assert [names(OUTAGE, KEY, level) for level in (KEY, "github/acct", "github")] == [True, True, False]
    assert names(REST, KEY, "github")
    assert not names(REST, KEY, "github", Tenancy.APART)
    assert scoped(REST, KEY, Tenancy.APART) == "github/acct"
