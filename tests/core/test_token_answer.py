"""What a token endpoint's answer means."""

from datetime import UTC, datetime

import pytest

from resilient.core.accounts.tokens import classify_token, token_in
from resilient.core.base.budgets import Fields
from resilient.core.base.errors import FailureKind as K
from resilient.core.base.errors import Scope
from resilient.core.base.exchange import AnswerFacts
from resilient.core.provider.auth import OAuth2, Rotation
from resilient.core.provider.rules import Errors, Rule

NOW = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
PLAIN = OAuth2(token_url="https://a/t")
SINGLE = OAuth2(token_url="https://a/t", rotation=Rotation.SINGLE_USE)


def means(status, body=None, oauth=PLAIN, text="", **headers):
    named = Fields.of({name.replace("_", "-"): value for name, value in headers.items()})
    failure = classify_token(AnswerFacts(status, named, body=body, text=text), oauth, NOW)
    return None if failure is None else (failure.kind, failure.scope)


def test_a_token_is_a_token():
    answer = AnswerFacts(200, body={"access_token": "t", "token_type": "bearer"})
    assert token_in(answer, PLAIN) == "t"
    assert classify_token(answer, PLAIN, NOW) is None


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        [],
        "t",
        {"access_token": ""},
        {"access_token": " "},
        {"access_token": None},
        {"access_token": 1},
        {"access_token": {"t": 1}},
        {"message": "slow down"},
        {"error": None},
        {"token": "t"},
    ],
)
def test_anything_else_with_a_good_status_is_an_outage_not_a_token(body):
    assert means(200, body) == (K.TRANSIENT, Scope.ACCOUNT)
    assert token_in(AnswerFacts(200, body=body), PLAIN) is None


@pytest.mark.parametrize("status", [302, 400, 500])
def test_a_token_with_a_bad_status_is_none(status):
    assert token_in(AnswerFacts(status, body={"access_token": "t"}), PLAIN) is None


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, {"error": "invalid_grant"}, (K.AUTH, Scope.ACCOUNT)),
        (403, {"error": "invalid_grant"}, (K.AUTH, Scope.ACCOUNT)),
        (200, {"error": "invalid_grant"}, (K.AUTH, Scope.ACCOUNT)),
        (401, {"error": "invalid_client"}, (K.AUTH, Scope.PROVIDER)),
        (400, {"error": "invalid_client"}, (K.AUTH, Scope.PROVIDER)),
        (401, None, (K.AUTH, Scope.PROVIDER)),
        (400, {"error": "unauthorized_client"}, (K.AUTH, Scope.PROVIDER)),
        (400, {"error": "temporarily_unavailable"}, (K.TRANSIENT, Scope.ACCOUNT)),
        (400, {"error": "slow_down"}, (K.THROTTLED, Scope.ACCOUNT)),
        (400, {"error": "invalid_scope"}, (K.PERMANENT, Scope.ACCOUNT)),
        (400, None, (K.PERMANENT, Scope.ACCOUNT)),
        (403, None, (K.PERMANENT, Scope.ACCOUNT)),
        (404, None, (K.PERMANENT, Scope.ACCOUNT)),
        (429, {"message": "slow down"}, (K.THROTTLED, Scope.ACCOUNT)),
        (500, None, (K.TRANSIENT, Scope.ACCOUNT)),
        (503, {"error": "invalid_grant"}, (K.AUTH, Scope.ACCOUNT)),
        (302, None, (K.TRANSIENT, Scope.ACCOUNT)),
    ],
)
def test_refusals(status, body, expected):
    assert means(status, body) == expected


def test_an_unknown_refusal_is_never_a_dead_grant():
    """A false alarm costs the customer a re-authorisation."""
    for status in range(200, 600):
        for body in (None, {}, {"error": "something"}, {"error": {"invalid_grant": 1}}):
            assert means(status, body) != (K.AUTH, Scope.ACCOUNT)


def test_a_lost_answer_is_ambiguous_where_a_refresh_token_is_used_up():
    assert means(502)[0] is K.TRANSIENT
    assert means(502, oauth=SINGLE)[0] is K.AMBIGUOUS
    assert means(504, oauth=SINGLE)[0] is K.AMBIGUOUS
    assert means(503, oauth=SINGLE)[0] is K.TRANSIENT


def test_a_wait_that_was_told_is_kept():
    failure = classify_token(AnswerFacts(429, Fields.of({"Retry-After": "3600"})), PLAIN, NOW)
    assert failure.retry_in == 3600


def test_the_providers_own_rules_come_first():
    oauth = OAuth2(
        token_url="https://a/t",
        errors=Errors(code=("status",), rules=(Rule(K.AUTH, code="GONE"), Rule(K.QUOTA, code="invalid_grant"))),
    )
    assert means(400, {"status": "GONE"}, oauth) == (K.AUTH, Scope.ACCOUNT)
    assert means(200, {"status": "invalid_grant"}, oauth) == (K.QUOTA, Scope.ACCOUNT)
